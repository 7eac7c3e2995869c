"""``python -m benchmarks rollback`` for real: files, exit codes, and Ctrl-C."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.benchmarks import BENCHMARKS, REPOSITORY, refused, run_benchmarks
from tests.support.terminal import hear_ctrl_c

TINY = ["--batches", "1,3", "--draft-lengths", "1,2", "--layers", "2", "--repeats", "2"]
TIMEOUT_S = 300


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_benchmarks(
        "rollback", "--device", "cpu", *arguments, timeout_s=TIMEOUT_S
    )


def test_a_run_writes_figures_of_all_contenders_and_a_picture(tmp_path: Path) -> None:
    done = bench(*TINY, "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (json_path,) = tmp_path.glob("rollback-*.json")
    assert {path.name for path in tmp_path.iterdir()} == {
        json_path.name,
        json_path.with_suffix(".png").name,
    }
    assert json_path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    result = json.loads(json_path.read_text())
    chosen = result["backends"]["chosen"]
    assert [(c["batch"], c["draft_length"]) for c in result["metadata"]] == [
        (batch, length) for batch in (1, 3) for length in (1, 2)
    ]
    for case in result["metadata"]:
        assert {chosen, f"{chosen}_as_called", "vllm_chain"} <= set(case["contenders"])
        assert len(case["as_called_over_chain"]["each"]) == 2
    for case in result["payload"]:
        assert {chosen, "torch_indexing"} <= set(case["contenders"])
        assert case["contenders"][chosen]["copy_fraction"] > 0
    assert set(result["layouts"]["measured"]) >= {"mla", "nhd", "hnd"}
    assert result["copy_bandwidth"]["gb_per_s"]["median"] > 0
    assert len(result["copy_bandwidth"]["gb_per_s"]["each"]) == 4
    judged = [target["name"] for target in result["targets"] if target["value"]]
    assert len(judged) == 2, "one ratio for each batch"
    assert result["provenance"]["command"][:2] == ["benchmarks", "rollback"]
    assert "Metadata rollback" in done.stdout
    assert json_path.name in done.stdout.replace("\n", "")


def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    for arguments, message in (
        (["--batches", "1,none"], "batches: '1,none' is not allowed; must be"),
        (["--draft-lengths", "99"], "draft-lengths: '99' is not allowed; must be"),
        (["--device", "gpu"], "device: 'gpu' is not allowed; must be one of auto"),
        (["--output", str(tmp_path / "missing")], "missing' is not allowed; must be"),
    ):
        done = refused("rollback", "--device", "cpu", *arguments)
        assert done.stderr.startswith("error: ")
        assert message in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
    # And as a process, for its exit code.
    assert bench("--device", "gpu").returncode == 2


@pytest.mark.long
def test_control_c_leaves_no_file(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*BENCHMARKS, "rollback", "--device", "cpu", "--output", str(tmp_path)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_ctrl_c,
    ) as process:
        assert process.stdout is not None
        assert "copy bandwidth" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert "interrupted; nothing was written" in errors
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
