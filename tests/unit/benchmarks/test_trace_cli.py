"""``python -m benchmarks trace``: tables, files and one sentence about wrong input."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from benchmarks.__main__ import app
from benchmarks.control.synthetic_worlds import WORLDS
from benchmarks.control.trace_bench import targets
from benchmarks.control.trace_replay import replay
from vllm_mtp.control.randomized import RandomController
from vllm_mtp.integration.observe.tracing import TracingController


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "mine.jsonl"
    controller = TracingController(RandomController(8, 0), path, {}, 8)
    replay(WORLDS["cpu-1-good"], controller, 400)
    controller.close()
    return path


def test_a_replay_writes_its_figures_and_pictures(
    tmp_path: Path, recording: Path
) -> None:
    world = "cpu-1-flip"
    done = call(
        "replay", "--world", world, "--trace", recording, "--steps", "810",
        "--controller", "goodput", "--controller", "fixed-1", "--seeds", "2",
        "--output", tmp_path,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "replay.json").read_text())
    assert result["provenance"]["versions"]["vllm-mtp"]
    runs = {(run["world"], run["controller"]): run for run in result["runs"]}
    names = {(w, c) for w in (world, "mine") for c in ("goodput", "fixed-1")}
    assert set(runs) == names
    fixed = runs[world, "fixed-1"]
    assert fixed["kind"] == "changing"
    assert fixed["switches"] == 0
    assert 0 < fixed["over_best_static"] <= 1 + 1e-9
    assert [len(each) for each in fixed["regret_after_changes_of_each_seed"]] == [1, 1]
    assert runs["mine", "goodput"]["kind"] == "recorded"
    assert runs["mine", "goodput"]["regret_after_changes"] is None
    assert {target["name"] for target in result["targets"]} == {
        "regret, recorded",
        "regret, after a change",
    }
    for name in ("regret", "depth", "cost"):
        picture = (tmp_path / f"replay-{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
    for text in ("mine", world, "fixed-1", "regret"):
        assert text in done.output


def run_of(world: str, kind: str, **regrets: Any) -> dict[str, Any]:
    rest = {"controller": "goodput", "regret_after_changes": None}
    return {"world": world, "kind": kind, **rest, **regrets}


def test_targets_are_judged_by_the_worst_world_of_the_goodput_controller() -> None:
    found = targets(
        [
            run_of("a", "stationary", regret=0.01),
            run_of("b", "stationary", regret=0.031),
            run_of("c", "stationary", regret=0.5, controller="threshold"),
            run_of("d", "changing", regret=0.2, regret_after_changes=0.079),
        ]
    )
    assert [(t["name"], t["world"], t["passed"]) for t in found] == [
        ("regret, stationary", "b", False),
        ("regret, after a change", "d", True),
    ]


def test_worlds_are_listed_one_in_a_line() -> None:
    listed = call("worlds").output.splitlines()
    assert [line.split()[0] for line in listed] == list(WORLDS)


def test_the_time_of_a_controller_is_printed_for_each_batch() -> None:
    done = call("time", "--requests", "1", "--requests", "4", "--blocks", "2")
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines() if "goodput" in line]
    assert [row[1] for row in rows] == ["1", "4"]
    assert all(float(row[2]) > 0 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["replay", "--world", "mars"], "world 'mars' does not exist"),
        (["replay", "--controller", "best"], "controller 'best' does not exist"),
        (["replay", "--steps", "10"], "steps: 10; expected at least 50"),
        (["replay", "--seeds", "0"], "seeds: 0; expected at least 1"),
        (["replay", "--output", "/nowhere"], "'/nowhere' is not a folder"),
        (["replay", "--trace", "/nowhere"], "'/nowhere' cannot be read"),
        (["replay", "--trace", __file__], "is no trace"),
        (["time", "--controller", "fixed-99"], "controller 'fixed-99'"),
    ],
)
def test_wrong_input_ends_with_a_sentence_and_exit_code_2(
    arguments: list[str], sentence: str
) -> None:
    done = call(*arguments)
    assert done.exit_code == 2
    assert sentence in done.output
    assert done.output.startswith("error: ")
    assert done.output.count("\n") == 1
