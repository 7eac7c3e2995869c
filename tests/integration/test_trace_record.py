"""``python -m benchmarks trace record`` with a real engine, and a replay."""

import os
import subprocess
from pathlib import Path

from benchmarks.control.trace_file import read_trace
from tests.support.benchmarks import refused, run_benchmarks
from tests.support.shared_engines import sharing_engines


def trace(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = sharing_engines(os.environ) | {"COLUMNS": "200"}
    return run_benchmarks("trace", *arguments, timeout_s=400, env=environ)


def test_a_recording_knows_every_draft_length_and_can_be_replayed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace.jsonl"
    load = ("--workload", "code,constrained", "--concurrency", "2")
    size = ("--temperature", "0", "--tokens", "40", "--rounds", "1")
    recorded = trace("record", str(path), *load, *size)
    assert recorded.returncode == 0, recorded.stderr
    written = read_trace(path)
    assert {d.decision.draft_depth for d in written.decisions} == set(range(9))
    assert sum(o.outcome.num_accepted_tokens for o in written.outcomes) > 0

    again = refused("trace", "record", str(path), *load, *size)
    assert "exists already" in again.stderr
    assert again.stderr.count("\n") == 1

    replayed = trace(
        *("replay", "--trace", str(path)),
        *("--controller", "fixed-2", "--output", str(tmp_path)),
    )
    assert replayed.returncode == 0, replayed.stderr
    assert (tmp_path / "replay.json").exists()
