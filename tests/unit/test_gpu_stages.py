"""``configs/gpu/stages.py``: what fits runs, once, and says how it ended."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "configs" / "gpu" / "stages.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stages", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_what_fits_runs_in_order_and_what_was_done_does_not(
    script: ModuleType, tmp_path: Path
) -> None:
    wanted = [
        script.Stage("good", 1.0, python("print('hello')")),
        script.Stage("bad", 1.0, python("raise SystemExit(3)")),
        script.Stage("long", 10_000.0, python("")),
    ]
    ended = script.run_stages(wanted, tmp_path, minutes=5.0)
    assert [(each.name, each.returncode) for each in ended] == [("good", 0), ("bad", 3)]
    assert (tmp_path / "good" / "log").read_text() == "hello\n"
    noted = json.loads((tmp_path / "bad" / "stage.json").read_text())
    assert noted["returncode"] == 3
    assert not (tmp_path / "long").exists()
    again = script.run_stages(wanted, tmp_path, minutes=5.0)
    assert [each.name for each in again] == ["bad"]


def test_a_stage_that_takes_all_the_time_is_ended(
    script: ModuleType, tmp_path: Path
) -> None:
    stage = script.Stage("stuck", 0.5, python("import time; time.sleep(60)"))
    (ended,) = script.run_stages([stage], tmp_path, script.MARGIN_S / 60 + 0.02)
    assert ended.returncode is None
    assert ended.seconds < 30


def test_a_stage_that_hangs_leaves_the_time_to_others(
    script: ModuleType, tmp_path: Path
) -> None:
    child = f"subprocess.run([{sys.executable!r}, '-c', 'import time; time.sleep(60)'])"
    wanted = [
        script.Stage("stuck", 0.5, python(f"import subprocess; {child}")),
        script.Stage("good", 0.5, python("")),
    ]
    stuck, good = script.run_stages(wanted, tmp_path, minutes=5.0)
    assert stuck.returncode is None
    assert stuck.seconds < 30
    assert good.returncode == 0


def test_stages_run_beside_each_other(script: ModuleType, tmp_path: Path) -> None:
    waits = (
        "import pathlib, sys, time\n"
        "mine, others = map(pathlib.Path, sys.argv[1:])\n"
        "mine.touch()\n"
        "while not others.exists(): time.sleep(0.01)\n"
    )
    one, two = str(tmp_path / "1"), str(tmp_path / "2")
    wanted = [
        script.Stage("one", 10.0, (*python(waits), one, two)),
        script.Stage("two", 10.0, (*python(waits), two, one), is_beside=True),
    ]
    ended = script.run_stages(wanted, tmp_path, minutes=5.0)
    assert [(each.name, each.returncode) for each in ended] == [("one", 0), ("two", 0)]


def test_a_stage_that_makes_something_is_done_where_that_is(
    script: ModuleType, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    touches = python(f"import pathlib; pathlib.Path({str(made)!r}).touch()")
    stage = script.Stage("make", 1.0, touches, product=made)
    for _ in range(2):
        (ended,) = script.run_stages([stage], tmp_path, minutes=5.0)
        assert ended.returncode == 0
        assert script.run_stages([stage], tmp_path, minutes=5.0) == []
        made.unlink()


def test_the_logs_of_failed_engines_stay_with_their_stage(
    script: ModuleType, tmp_path: Path
) -> None:
    stage = script.Stage("s", 1.0, python("import tempfile; tempfile.mkdtemp('kept')"))
    script.run_stages([stage], tmp_path, minutes=5.0)
    assert list((tmp_path / "s").glob("*kept"))


def test_every_stage_is_a_command_that_exists(
    script: ModuleType, tmp_path: Path
) -> None:
    from typer.main import get_command

    from benchmarks.__main__ import app

    benches = get_command(app).commands  # type: ignore[attr-defined]
    stages = script.stages(tmp_path / "model", tmp_path)
    assert len({stage.name for stage in stages}) == len(stages)
    beginning = sum(stage.seconds for stage in stages[:4] if not stage.is_beside)
    assert beginning <= 60 * 9 - script.MARGIN_S
    for stage in stages:
        if stage.command[1:3] == ("-m", "benchmarks"):
            command, *options = stage.command[3:]
            known = {o for p in benches[command].params for o in p.opts}
            assert {o for o in options if o.startswith("--")} <= known
        else:
            assert Path(stage.command[0]).is_file()


def test_an_unknown_stage_is_named(script: ModuleType, tmp_path: Path) -> None:
    import subprocess

    asked = ["--minutes", "1", "--output", str(tmp_path), "--only", "fast"]
    found = subprocess.run(
        [sys.executable, str(SCRIPT), *asked], capture_output=True, text=True
    )
    assert found.returncode == 2
    assert "--only fast: must be of kernels, engines, model" in found.stderr
