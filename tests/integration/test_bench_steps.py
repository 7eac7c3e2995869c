"""``python -m benchmarks steps`` for real: engines, a JSON file, a picture."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.benchmarks import refused, run_benchmarks
from tests.support.shared_engines import sharing_engines


def bench_steps(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = sharing_engines(os.environ) | {"COLUMNS": "200"}
    return run_benchmarks("steps", *arguments, timeout_s=400, env=environ)


@pytest.mark.long
def test_two_engines_are_compared_step_by_step(tmp_path: Path) -> None:
    plus = '={"method": "mtp_plus", "controller": "fixed", "num_speculative_tokens": 2'
    result = bench_steps(
        *("--contender", f"kept{plus}}}"),
        *("--contender", f'scrubbed{plus}, "kv_rollback": "scrub"}}'),
        *("--requests", "2", "--request-tokens", "16", "--repeats", "2"),
        *("--output", str(tmp_path)),
    )
    assert result.returncode == 0, result.stderr
    (written,) = tmp_path.glob("steps-*.json")
    content = json.loads(written.read_text())
    assert content["identical_texts"]
    kept, scrubbed = (content["contenders"][n] for n in ("kept", "scrubbed"))
    assert kept["num_steps"] == scrubbed["num_steps"]
    assert kept["acceptance_length"] == scrubbed["acceptance_length"] > 1
    assert kept["ratio"]["each"] == [1.0, 1.0]
    assert all(ratio > 0 for ratio in scrubbed["ratio"]["each"])
    assert content["provenance"]["versions"]["vllm"]
    assert written.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--contender", "a=none"], "contender: a; expected at least two"),
        (["--contender", "a={x"], "contender: 'a={x'; expected NAME=none"),
        (["--output", "/nowhere"], "output: '/nowhere' is not allowed"),
        (["--model", "/nowhere"], "model: '/nowhere' is neither a folder"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], words: str
) -> None:
    result = refused("steps", *arguments)
    assert words in result.stderr
    assert "Traceback" not in result.stderr
