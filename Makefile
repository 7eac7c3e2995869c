# make setup | demo | demo-ray | serve | bench | test | quality | format | python
# Every target sets up what is missing first; when nothing is, that takes a tenth of a
# second. The environment is outside the clone: configs/environment/layout.py says where.

PYTHON ?=
MODEL ?=
PORT ?= 8000
ARGS ?=

base_python = $(shell sh configs/environment/find_python $(PYTHON) || echo false)
bootstrap = $(base_python) configs/environment/bootstrap.py
run = $(bootstrap) exec

model = $(or $(MODEL),examples/tiny_model/mimo-python)
# Without a GPU: start in seconds, and take one GiB for the KV cache, not the machine's
# memory. ARGS come later on the command line and win.
serve_args_cpu = --enforce-eager --kv-cache-memory-bytes 1073741824
serve_args_gpu =

# Test files side by side. One GPU has room for one engine at a time.
test_jobs = $(if $(filter gpu,$(shell $(bootstrap) hardware)),1,2)

.DEFAULT_GOAL := help
.PHONY: help setup python demo demo-ray serve bench lint quality test pytest test-long format

help:
	@echo 'make setup            build the environment of this clone (outside the clone)'
	@echo 'make demo [MODEL=]    mtp_plus, mtp and no speculation side by side'
	@echo 'make demo-ray [MODEL=]  two servers behind one endpoint, by Ray'
	@echo 'make serve [MODEL=] [PORT=8000] [ARGS=]   a server with mtp_plus'
	@echo 'make bench ARGS=...   measure: rollback, steps, grid; python -m benchmarks'
	@echo 'make test             style, types and every test but the long ones'
	@echo 'make test-long        those'
	@echo 'make quality          style, types and the import rule'
	@echo 'make format           let ruff rewrite the style'
	@echo 'make -s python        print the interpreter of the environment'

setup:
	@$(bootstrap) setup

python:
	@$(bootstrap) python

demo: setup
	@$(run) vllm-mtp demo '$(model)' $(ARGS)

demo-ray: setup
	@$(run) python -m examples.ray_serve --model '$(model)' $(ARGS)

serve: setup
	@$(run) vllm serve '$(model)' --port $(PORT) \
	  --speculative-config '{"method":"mtp_plus"}' \
	  $(serve_args_$(shell $(bootstrap) hardware)) $(ARGS)

bench: setup
	@$(run) python -m benchmarks $(ARGS)

lint: setup
	@$(run) ruff check .
	@$(run) ruff format --check .
	@$(run) mypy vllm_mtp benchmarks examples configs/environment

quality: lint
	@$(run) python -m pytest -q tests/unit/test_import_rules.py

test: lint pytest

pytest: setup
	@$(run) python -m pytest tests -n $(test_jobs) --dist loadfile --no-loadscope-reorder $(ARGS)

test-long: setup
	@LONG_TESTS=1 $(run) python -m pytest tests -m long -n $(test_jobs) \
	  --dist loadfile $(ARGS)

format: setup
	@$(run) ruff check --fix .
	@$(run) ruff format .
