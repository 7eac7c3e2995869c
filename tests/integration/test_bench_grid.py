"""``python -m benchmarks grid`` as a user runs it, interrupted and continued."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.benchmarks import BENCHMARKS, REPOSITORY, refused, run_benchmarks
from tests.support.shared_engines import sharing_engines
from tests.support.terminal import hear_ctrl_c

CONTENDERS = ["none", "none again", "mtp K=1", "mtp_plus again", "mtp_plus"]
CELLS = ["code c=2 T=0 short", "phases c=2 T=0 short"]
TINY = [
    *("--workload", "code,phases", "--concurrency", "2", "--temperature", "0"),
    *("--context", "short", "--draft-lengths", "1", "--repeats", "2"),
    *("--max-repeats", "2"),
    *("--round-seconds", "0.05", "--settle-seconds", "0.1"),
    *("--kv-cache-mib", "32"),
]
ENVIRON = os.environ | {"COLUMNS": "80", "OMP_NUM_THREADS": "1"}


def bench_grid(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = sharing_engines(ENVIRON)
    return run_benchmarks("grid", *arguments, timeout_s=300, env=environ)


def rounds(folder: Path) -> list[dict[str, Any]]:
    """What has been measured so far."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.open()]
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in records if record["kind"] == "round"]


def children(parent: int) -> list[int]:
    """Processes that another one started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(after_name[1]) == parent:
            found.append(int(status.parent.name))
    return found


def interrupt_after_the_first_rounds(folder: Path) -> int:
    """Start, wait for a whole repeat, press Ctrl-C; how many rounds were kept."""
    process = subprocess.Popen(
        [*BENCHMARKS, "grid", *TINY, "--output", str(folder)],
        cwd=REPOSITORY,
        env=ENVIRON,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_ctrl_c,
    )
    try:
        deadline = time.monotonic() + 200
        while len(rounds(folder)) < len(CONTENDERS):
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        # All are forked from a process that has imported vLLM.
        engines = [pid for each in children(process.pid) for pid in children(each)]
        assert len(engines) == len(CONTENDERS)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "what was measured is kept" in errors
    assert not [pid for pid in engines if Path(f"/proc/{pid}").exists()]
    return len(rounds(folder))


@pytest.mark.long
def test_an_interrupted_grid_continues_and_ends_with_a_result(tmp_path: Path) -> None:
    num_kept = interrupt_after_the_first_rounds(tmp_path)
    assert num_kept < len(CONTENDERS) * len(CELLS) * 2  # it was not over yet
    first = rounds(tmp_path)[: len(CONTENDERS)]

    done = bench_grid(*TINY, "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr

    (path,) = tmp_path.glob("grid-*.json")
    result = json.loads(path.read_text())
    assert rounds(tmp_path)[: len(CONTENDERS)] == first  # nothing measured was lost
    keys = [(r["cell"], r["repeat"], r["contender"]) for r in rounds(tmp_path)]
    assert len(set(keys)) == len(CONTENDERS) * len(CELLS) * 2
    assert len(keys) < len(set(keys)) + len(CONTENDERS)  # at most one repeat again

    assert [cell["name"] for cell in result["cells"]] == CELLS
    for cell in result["cells"]:
        assert cell["identical_texts"]
        assert list(cell["contenders"]) == CONTENDERS
        static = cell["contenders"]["mtp K=1"]
        assert static["acceptance_length"] > 1
        assert 0.8 < static["mean_draft_length"] <= 1  # the last token needs no draft
        assert static["split_ms"]["draft"] > 0
        assert len(cell["plus_over_none"]["each"]) == 2
    code, phases = (cell["contenders"]["mtp K=1"] for cell in result["cells"])
    acceptance = "acceptance_per_position"
    assert phases[acceptance][0] < code[acceptance][0]  # half of it is constrained
    assert all(engine["has_mended_sampling"] for engine in result["engines"].values())
    assert result["provenance"]["versions"]["vllm"]
    assert len(list(tmp_path.glob("grid-*.png"))) == 1

    other = refused("grid", *TINY, "--output", str(tmp_path), "--dtype", "bfloat16")
    assert "dtype: 'bfloat16' is not 'float32', with which" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workload", "poems"], "workload: 'poems' is not allowed; must be of code"),
        (["--concurrency", "1;2"], "concurrency: '1;2' is not allowed"),
        (["--model", "/nowhere"], "model: '/nowhere' is neither a folder"),
        (["--long-context", "1900"], "long-context: 1900 is not allowed; must be at"),
        (["--report-only", "/nowhere.jsonl"], "/nowhere.jsonl holds nothing"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    result = refused("grid", "--output", str(tmp_path), *arguments)
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())
