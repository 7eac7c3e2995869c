"""``vllm-mtp trace record`` with a real engine, then a replay of what it wrote."""

import os
import subprocess
import sys
from pathlib import Path

from vllm_mtp.lab.trace_file import read_trace


def vllm_mtp(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = str(Path(sys.executable).with_name("vllm-mtp"))
    return subprocess.run(
        [command, *arguments],
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=400,
    )


def test_a_recording_knows_every_draft_length_and_can_be_replayed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace.jsonl"
    load = ("--workload", "code,constrained", "--concurrency", "2")
    size = ("--temperature", "0", "--tokens", "40", "--rounds", "1")
    recorded = vllm_mtp("trace", "record", str(path), *load, *size)
    assert recorded.returncode == 0, recorded.stderr
    trace = read_trace(path)
    assert {d.decision.draft_depth for d in trace.decisions} == set(range(9))
    assert sum(o.outcome.num_accepted_tokens for o in trace.outcomes) > 0

    again = vllm_mtp("trace", "record", str(path), *load, *size)
    assert again.returncode == 2
    assert "exists already" in again.stderr
    assert again.stderr.count("\n") == 1

    replayed = vllm_mtp(
        *("trace", "replay", "--trace", str(path)),
        *("--controller", "fixed-2", "--output", str(tmp_path)),
    )
    assert replayed.returncode == 0, replayed.stderr
    assert (tmp_path / "replay.json").exists()
