"""Routing by acceptance, simulated: who gets which requests, and what is compared."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.control.routing import RoutedEngine, compare_routing, run_routing
from benchmarks.control.synthetic import SyntheticEngine
from benchmarks.control.synthetic_worlds import WORLDS

TWO_KINDS = WORLDS["h200-70b-64-kinds"].changed(name="kinds-1")
ALL_ALIKE = WORLDS["h100-32-tuned"].changed(name="alike-1")
SPREAD = WORLDS["h100-256-spread"].changed(name="spread-1")
STEPS = 120


def first_acceptance(engine: SyntheticEngine) -> list[float]:
    """Of each request's first draft token, once all have begun."""
    engine.begin()
    found: list[float] = engine._conditional()[:, 0].tolist()
    return found


def test_each_replica_gets_one_side_and_equally_many() -> None:
    good = first_acceptance(RoutedEngine(SPREAD, 1, gets_good=True))
    poor = first_acceptance(RoutedEngine(SPREAD, 1, gets_good=False))
    assert len(good) == len(poor) == SPREAD.num_requests
    assert min(good) > max(poor)
    mixed = first_acceptance(SyntheticEngine(SPREAD, 1))
    assert min(mixed) < min(good)
    assert max(mixed) > max(poor)


def test_the_gain_is_the_replica_time_of_the_same_tokens() -> None:
    found = compare_routing(TWO_KINDS, STEPS)
    round_robin, good, poor = found.seconds_per_token
    assert good < round_robin < poor
    assert found.gain == pytest.approx(2 * round_robin / (good + poor) - 1)
    assert found == compare_routing(TWO_KINDS, STEPS)


def test_where_requests_are_alike_nothing_is_gained() -> None:
    found = compare_routing(ALL_ALIKE, STEPS)
    assert abs(found.gain) < 0.02


def test_the_result_has_every_world(tmp_path: Path) -> None:
    result = run_routing(2, tmp_path, Console(quiet=True), num_steps=20)
    written = json.loads((tmp_path / "routing.json").read_text())
    assert [each["world"] for each in written["worlds"]] == [
        each["world"] for each in result["worlds"]
    ]
    low, high = written["gain"]["low"], written["gain"]["high"]
    assert low <= written["gain"]["value"] <= high


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--worlds", "1"], "worlds: 1; expected at least 2"),
        (["--output", "/nowhere"], "output: '/nowhere' is not a folder"),
    ],
)
def test_a_wrong_option_is_one_sentence(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["trace", "routing", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr
