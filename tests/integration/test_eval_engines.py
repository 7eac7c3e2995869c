"""``vllm-mtp eval`` and ``compare`` with real engines and a real server.

A healthy MTP layer twice, then a damaged one: the comparison must let the first pair
through and name the second.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.engines import forking_servers
from tests.support.heldout import BUNDLED_CHECKPOINT
from tests.support.shared_engines import sharing_engines
from tests.support.terminal import hear_ctrl_c
from vllm_mtp.tools.eval_file import read_eval_file
from vllm_mtp.tools.server_process import Server, ServerGroup, free_ports

PROGRAM = str(Path(sys.executable).with_name("vllm-mtp"))
SIZE = ("--num-prompts", "24", "--max-tokens", "96", "--dtype", "float32")
MODEL = ("--model", str(BUNDLED_CHECKPOINT))
ENGINE = ("--max-model-len", "512")


def vllm_mtp(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, *arguments],
        env=sharing_engines(os.environ) | {"COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eval") / "base.json"
    done = vllm_mtp("eval", str(path), *MODEL, *SIZE, *ENGINE)
    assert done.returncode == 0, done.stderr
    assert "acceptance length" in done.stdout
    return path


def test_an_evaluation_counts_every_prompt(base: Path) -> None:
    file = read_eval_file(base)
    assert len(file.records) == 24
    assert file.model == BUNDLED_CHECKPOINT.name
    assert file.draft_length == 3
    for record in file.records:
        assert record.num_tokens <= 96
        assert record.num_draft_tokens == 3 * record.num_drafts
    assert sum(record.accepted[0] for record in file.records) > 400


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluation that was interrupted, and then went on to its end."""
    path = tmp_path_factory.mktemp("continued") / "eval.json"
    partial = path.with_name("eval.json.partial")
    command = [PROGRAM, "eval", str(path), *MODEL, *SIZE, *ENGINE]
    process = subprocess.Popen(
        command,
        env=sharing_engines(os.environ),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_ctrl_c,
    )
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        if partial.exists() and len(partial.read_text().splitlines()) > 8:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "finished prompts are kept" in errors
    assert partial.exists()
    assert not path.exists()
    assert vllm_mtp(*command[1:]).returncode == 0
    assert not partial.exists()
    return path


def damaged_checkpoint(folder: Path) -> Path:
    """The bundled one, with noise in its MTP layer; the target is the same."""
    folder.mkdir()
    for file in BUNDLED_CHECKPOINT.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(BUNDLED_CHECKPOINT / "model.safetensors")
    name = "model.mtp_layers.0.input_proj.weight"
    tensors[name] = tensors[name].roll(3, dims=0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_damaged_mtp_layer_is_worse_and_a_healthy_one_is_not(
    base: Path, continued: Path, tmp_path: Path
) -> None:
    same = vllm_mtp("compare", str(base), str(continued))
    assert same.returncode == 0, same.stdout
    # A copy of the same name: in CI both commits serve the same model.
    model = damaged_checkpoint(tmp_path / BUNDLED_CHECKPOINT.name)
    damaged = tmp_path / "damaged.json"
    done = vllm_mtp("eval", str(damaged), "--model", str(model), *SIZE, *ENGINE)
    assert done.returncode == 0, done.stderr
    worse = vllm_mtp("compare", str(base), str(damaged))
    assert worse.returncode == 1, worse.stdout + worse.stderr
    assert "Worse: acceptance length, position 1" in worse.stdout


def test_an_interrupted_evaluation_goes_on_and_ends_like_another(
    base: Path, continued: Path
) -> None:
    counts = [
        [(r.id, r.tested, r.accepted) for r in read_eval_file(each).records]
        for each in (base, continued)
    ]
    assert counts[0] == counts[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    (port,) = free_ports(1)
    command = [
        str(Path(sys.executable).with_name("vllm")),
        "serve",
        str(BUNDLED_CHECKPOINT),
        *("--served-model-name", BUNDLED_CHECKPOINT.name),
        *("--port", str(port), "--host", "127.0.0.1"),
        *("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8"),
        *("--kv-cache-memory-bytes", str(64 * 2**20), "--enforce-eager"),
        # As the engine of `eval`: a vocabulary that is learnt depends on the past.
        *("--speculative-config", '{"method": "mtp_plus", "draft_vocab": "full"}'),
    ]
    log = tmp_path_factory.mktemp("serve") / "server.log"
    running = Server("mtp_plus", command, port, log)
    with ServerGroup([running], forking_servers(os.environ)) as group:
        group.wait_ready(timeout_s=300, report=lambda line: None)
        yield running


def test_a_server_gives_the_same_counts(
    server: Server, base: Path, tmp_path: Path
) -> None:
    path = tmp_path / "served.json"
    prompts = str(BUNDLED_CHECKPOINT / "heldout_prompts.jsonl")
    url = f"{server.url}/v1"
    done = vllm_mtp("eval", str(path), "--server", url, "--prompts", prompts, *SIZE)
    assert done.returncode == 0, done.stderr
    counts = [
        [(r.id, r.tested, r.accepted) for r in read_eval_file(each).records]
        for each in (base, path)
    ]
    assert counts[0] == counts[1]


def test_a_conversation_of_two_turns_is_counted_whole(
    server: Server, tmp_path: Path
) -> None:
    prompts = tmp_path / "question.jsonl"
    line = {
        "question_id": 81,
        "category": "coding",
        "turns": ["def f(x):", "def g(x):"],
    }
    prompts.write_text(json.dumps(line) + "\n")
    path = tmp_path / "conversation.json"
    wanted = ("--set", "spec-bench", "--prompts", str(prompts), "--max-tokens", "32")
    done = vllm_mtp("eval", str(path), "--server", f"{server.url}/v1", *wanted)
    assert done.returncode == 0, done.stderr
    (record,) = read_eval_file(path).records
    assert record.category == "multi-turn conversation"
    assert 32 < record.num_tokens <= 64
    assert record.num_draft_tokens == 3 * record.num_drafts


def test_auto_needs_a_server_that_lists_its_drafts(
    server: Server, tmp_path: Path
) -> None:
    url = f"{server.url}/v1"
    path = str(tmp_path / "eval.json")
    done = vllm_mtp("eval", path, "--server", url, "--k", "auto", *SIZE)
    assert done.returncode == 2
    assert "start it with --per-request-spec-decode-metrics detailed" in done.stderr
    assert done.stderr.count("\n") == 1
