"""Worlds drawn at random, what controllers are worth in them, and the promise."""

import json
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from rich.console import Console

from benchmarks.control.held_out import (
    CONTENDERS,
    PROMISE,
    bootstrap,
    difference,
    fifth_percentile,
    run_held_out,
    score,
)
from benchmarks.control.random_worlds import (
    NUM_POSITIONS,
    held_out_worlds,
    random_world,
    tuning_worlds,
)
from benchmarks.control.size import Size, controller_size, size_of
from vllm_mtp.config import ConfigError
from vllm_mtp.control.fixed import FixedController

NUM_WORLDS = 20


def test_a_seed_is_a_world() -> None:
    assert random_world(7) == random_world(7)
    assert random_world(7) != random_world(9)


def test_no_world_is_for_tuning_and_held_out() -> None:
    tuning = {world.name for world in tuning_worlds(200)}
    held_out = {world.name for world in held_out_worlds(200)}
    assert len(tuning) == len(held_out) == 200
    assert not tuning & held_out


def test_worlds_differ_in_whether_a_further_token_pays() -> None:
    """A draft token of every request takes a tenth more in some, as long in others."""
    costs = []
    for world in held_out_worlds(60):
        n, cost = world.num_requests, world.cost
        rows = np.array([n, 2 * n])
        off_s, one_s = cost.verify_s(n, rows, 500.0 * n, is_uniform=True)
        costs.append((one_s + cost.draft_s(n, 1, 500.0 * n)) / off_s)
        assert world.law.conditional(
            0, NUM_POSITIONS, np.zeros(1), np.zeros(1), np.full(1, 100.0)
        ).shape == (1, NUM_POSITIONS)
    assert min(costs) < 1.15
    assert max(costs) > 1.8


@pytest.mark.parametrize("draft_length", [0, 3])
def test_a_fixed_draft_length_is_worth_what_it_is_compared_with(
    draft_length: int,
) -> None:
    world = random_world(5)
    found = score(world, FixedController(draft_length), 300)
    if draft_length == 0:
        assert found.over_no_drafts == pytest.approx(1.0)
    assert found.over_best_fixed <= 1.0 + 1e-9
    assert 0.0 <= found.regret < 1.0
    assert found.explored == 0.0


def test_the_same_world_and_controller_give_the_same_score() -> None:
    world = random_world(3)
    first, second = (score(world, CONTENDERS["goodput"](world), 400) for _ in range(2))
    assert first._replace(host_us=0.0) == second._replace(host_us=0.0)


def test_the_promise_holds_in_worlds_that_nothing_was_tuned_by() -> None:
    """Of 19 in 20 worlds; and regret stays near what the results say."""
    scores = [score(w, CONTENDERS["goodput"](w)) for w in held_out_worlds(NUM_WORLDS)]
    speeds = np.array([found.over_no_drafts for found in scores])
    assert fifth_percentile(speeds) >= PROMISE
    assert fmean(found.regret for found in scores) < 0.04
    assert fmean(found.over_best_fixed for found in scores) > 0.98


def test_an_interval_of_paired_worlds_is_narrower_than_that_of_worlds() -> None:
    world = random_world(3)
    found = score(world, FixedController(0), 100)
    rng = np.random.default_rng(0)
    base = [
        found._replace(world=f"w{i}", regret=r) for i, r in enumerate(rng.random(50))
    ]
    better = [s._replace(regret=s.regret - 0.01) for s in base]
    paired = difference(better, base)["regret"]
    alone = bootstrap([s.regret for s in base])
    assert paired.value == pytest.approx(-0.01)
    assert paired.high - paired.low < 1e-6 < alone.high - alone.low


def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    result = run_held_out(["goodput", "threshold"], 2, tmp_path, console)
    written = json.loads((tmp_path / "held-out.json").read_text())
    assert written == json.loads(json.dumps(result))
    assert set(written["summaries"]) == {"goodput", "threshold"}
    assert set(written["differences"]) == {"threshold"}
    assert "threshold beside the first" in console.export_text()


@pytest.mark.parametrize(
    ("names", "num_worlds", "message"),
    [(["best"], 2, "controller 'best'"), (["goodput"], 1, "worlds: 1")],
)
def test_bad_options_are_refused_in_one_sentence(
    names: list[str], num_worlds: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_held_out(names, num_worlds, tmp_path, Console())


def test_the_controller_stays_as_small_as_was_agreed() -> None:
    size = controller_size()
    assert size.is_within_limits, size.describe()


def test_constants_are_numbers_with_a_name(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "A = 1.5\n_B, C = 2, -3\nD = 'text'\nE = (1, 2.0)\nF = A\n"
        "class G:\n    h: float = 4.0\n    i: bool = False\n    j: int = 0\n"
    )
    assert size_of(tmp_path) == Size(
        9, ["m.A", "m._B", "m.C", "m.E", "m.G.h"], longest_file=9, longest_function=0
    )
