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


def test_every_stage_is_a_command_that_exists(
    script: ModuleType, tmp_path: Path
) -> None:
    from typer.main import get_command

    from benchmarks.__main__ import app

    benches = get_command(app).commands  # type: ignore[attr-defined]
    stages = script.stages(tmp_path / "model", tmp_path)
    assert len({stage.name for stage in stages}) == len(stages)
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
    assert "--only fast: must be of kernels, engines, off" in found.stderr
