"""Acceptance on a set of prompts, prompt by prompt, to be compared between commits.

Requests fix their draft length (K = 3 unless told otherwise) and an engine of our own
drafts from the whole vocabulary, so that what is measured depends on the model and its
MTP layers and not on how fast a machine is or what it served before; at temperature 0
two runs of the same model then give the same counts.

Finished prompts are kept in ``OUTPUT.partial`` until all are: the same command
continues an evaluation that was interrupted. Engines on a Ray cluster (`--ray`) share
the prompts; at temperature 0 in float32 each prompt's counts are those of one engine.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import track

from vllm_mtp.config import FULL, METHOD, ConfigError
from vllm_mtp.request_options import AUTO
from vllm_mtp.tools.engine_arguments import EngineSize
from vllm_mtp.tools.eval_backends import (
    Backend,
    Sampling,
    ServerBackend,
    started_engine,
)
from vllm_mtp.tools.eval_file import EvalFile, PromptRecord, merged, record_of
from vllm_mtp.tools.eval_journal import EvalJournal
from vllm_mtp.tools.eval_report import print_eval
from vllm_mtp.tools.eval_turns import answers_to_turns
from vllm_mtp.tools.option_checks import (
    check_name,
    check_output,
    check_verifies,
    refuse,
    resolve_model,
)
from vllm_mtp.tools.options import MODEL_HELP, Options, argument, option
from vllm_mtp.tools.prompt_sets import SETS, load_set
from vllm_mtp.tools.prompts import Prompt, fingerprint_of, load_prompts
from vllm_mtp.tools.provenance import collect_provenance, replacing
from vllm_mtp.tools.ray_cluster import require_ray
from vllm_mtp.tools.ray_eval import started_ray_engines

KV_CACHE_MIB = 512


@dataclass(frozen=True)
class EvalOptions(Options):
    """Measure acceptance prompt by prompt, to be compared by `vllm-mtp compare`."""

    output: Path = argument("Evaluation to write (JSON).")
    model: str | None = option(
        None, f"{MODEL_HELP} Of a server: which of its models. Unset: its only one."
    )
    server: str | None = option(
        None,
        "Ask a running server instead, for example http://localhost:8000/v1 (its key: "
        "OPENAI_API_KEY).",
    )
    prompts: Path | None = option(
        None,
        "A .jsonl with text or messages, id and category. Unset: what the checkpoint "
        "brings, or 96 built-in ones in 8 categories.",
    )
    prompt_set: str | None = option(
        None,
        "The prompts are of a paper: spec-bench (its question.jsonl) or speed-bench (a "
        "prepared .jsonl).",
        name="set",
    )
    num_prompts: int | None = option(None, "At most. Unset: all.", 1, 10**6)
    k: str = option("3", "Draft length of every request, or auto: the controller's.")
    temperature: float = option(0.0, "Of sampling.", 0, 2)
    max_tokens: int = option(256, "Of every answer.", 1, 10**5)
    concurrency: int = option(8, "Requests at a time, of each engine.", 1, 512)
    ray: int | None = option(
        None,
        "Engines on a Ray cluster, one GPU each, that share the prompts. Unset: one "
        "engine here.",
        1,
        4096,
    )
    dtype: str = option("auto", "Of an engine of our own.")
    max_model_len: int = option(2048, "Of an engine of our own.", 16, 10**7)
    speculative_config: dict[str, Any] = option(
        {"method": METHOD, "draft_vocab": FULL}, "Of an engine of our own (JSON)."
    )

    def __post_init__(self) -> None:
        """Check every option; see `Options`."""
        super().__post_init__()
        if self.k != AUTO and not self.k.isdecimal():
            refuse("k", self.k, f"{AUTO!r} or a whole number")
        if self.draft_length is not None and not 1 <= self.draft_length <= 16:
            refuse("k", self.draft_length, "a number from 1 to 16")
        if self.model is None and self.server is None:
            raise ConfigError("model: name one, or a server that has one")
        if self.ray is not None and self.server is not None:
            raise ConfigError("ray: a server has engines of its own; name one of both")
        if self.ray is not None:
            require_ray()
        if self.prompt_set is not None:
            check_name("set", self.prompt_set, SETS)
            if self.prompts is None:
                raise ConfigError(f"prompts: name the file of {self.prompt_set}")
        check_verifies(self.speculative_config)
        check_output(self.output)
        if self.output.exists():
            raise ConfigError(f"output: {self.output} exists already; name another")

    @property
    def draft_length(self) -> int | None:
        """K of every request; None for the controller's choice."""
        return None if self.k == AUTO else int(self.k)

    @property
    def sampling(self) -> Sampling:
        """Of every request."""
        return Sampling(self.draft_length, self.temperature, self.max_tokens)


def run_eval(options: EvalOptions, console: Console) -> EvalFile:
    """Ask what is not answered yet, write and print.

    Raises:
        ConfigError: Prompts or server cannot be used.
        ServerError: Our own engine failed.
    """
    if options.server is None:
        model = resolve_model(options.model or "")
        prompts = _prompts_of(options, model)
        with _journal_of(options, model, prompts) as journal:
            missing = journal.missing(prompts)
            if missing:
                with _own_engines(options, model, console) as backend:
                    _ask(backend, missing, journal, options, console)
            return _finish(journal, prompts, options, console)
    server = ServerBackend(
        options.server,
        options.model,
        os.environ.get("OPENAI_API_KEY", "none"),
        options.sampling,
        options.concurrency,
    )
    prompts = _prompts_of(options, server.model)
    with _journal_of(options, server.model, prompts) as journal:
        _ask(server, journal.missing(prompts), journal, options, console)
        return _finish(journal, prompts, options, console)


def _prompts_of(options: EvalOptions, model: str) -> list[Prompt]:
    if options.prompt_set is None or options.prompts is None:
        return load_prompts(options.prompts, model, options.num_prompts)
    return load_set(options.prompt_set, options.prompts, options.num_prompts)


@contextmanager
def _own_engines(
    options: EvalOptions, model: str, console: Console
) -> Iterator[Backend]:
    """An engine here, or several on Ray."""
    size = EngineSize(
        model,
        options.max_model_len,
        options.concurrency,
        options.dtype,
        KV_CACHE_MIB,
    )
    config, sampling = options.speculative_config, options.sampling
    if options.ray is None:
        with started_engine(size, config, sampling) as engine:
            yield engine
        return
    with started_ray_engines(
        options.ray, size, config, sampling, console.print
    ) as engines:
        yield engines


@contextmanager
def _journal_of(
    options: EvalOptions, model: str, prompts: list[Prompt]
) -> Iterator[EvalJournal]:
    header = {
        # Where it lies on this machine is nobody else's business.
        "model": Path(model).name if Path(model).is_dir() else model,
        "prompts_sha256": fingerprint_of(prompts),
        "draft_length": options.draft_length or AUTO,
        "temperature": options.temperature,
        "max_tokens": options.max_tokens,
    }
    path = options.output.with_name(f"{options.output.name}.partial")
    with EvalJournal(path, header) as journal:
        yield journal


def _ask(
    backend: Backend,
    prompts: Sequence[Prompt],
    journal: EvalJournal,
    options: EvalOptions,
    console: Console,
) -> None:
    started_at_s = perf_counter()
    found = track(
        answers_to_turns(backend, prompts),
        "evaluating",
        total=len(prompts),
        console=console,
        disable=not console.is_terminal,
    )
    for prompt, answers in found:
        records = [
            record_of(
                prompt,
                answer.metrics,
                options.draft_length,
                answer.num_tokens,
                answer.seconds,
            )
            for answer in answers
        ]
        now_s = perf_counter()
        journal.add(merged(records), now_s - started_at_s)
        started_at_s = now_s


def _finish(
    journal: EvalJournal,
    prompts: Sequence[Prompt],
    options: EvalOptions,
    console: Console,
) -> EvalFile:
    by_id: dict[str, PromptRecord] = journal.records
    result = EvalFile(
        **journal.header,
        seconds=journal.seconds,
        records=tuple(by_id[prompt.id] for prompt in prompts),
        provenance=collect_provenance(sys.argv),
    )
    with replacing(options.output) as pending:
        pending.write_text(result.model_dump_json() + "\n", encoding="utf-8")
    journal.remove()
    print_eval(result, console)
    console.print(f"Written: {options.output}", markup=False)
    return result
