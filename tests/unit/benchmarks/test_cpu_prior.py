"""On a CPU rows cost from the first step on, and who knows that wastes less."""

import statistics

import pytest

from benchmarks.control.synthetic_worlds import WORLDS
from benchmarks.control.trace_bench import LIMITS, regrets_after_changes
from benchmarks.control.trace_replay import Replay, replay
from vllm_mtp.control.goodput import GoodputController
from vllm_mtp.control.options import GoodputOptions
from vllm_mtp.control.step_times import CPU_COST_PRIOR, CostPrior

FIRST_STEPS = 80
NUM_STEPS = 2400
SEEDS = range(6)


def run(name: str, prior: CostPrior, num_steps: int, seed: int = 0) -> Replay:
    world = WORLDS[name]
    options = GoodputOptions(
        sees_shadow_drafts=world.sees_shadow_drafts, cost_prior=prior
    )
    controller = GoodputController(world.max_draft_length, options)
    return replay(world, controller, num_steps, seed)


def speed_at_the_start(name: str, prior: CostPrior) -> float:
    """Of no speculation, over the first steps."""
    return statistics.fmean(
        run(name, prior, FIRST_STEPS + 20, seed).over_uniform(0, 0, FIRST_STEPS)
        for seed in SEEDS
    )


@pytest.mark.parametrize("name", ["core-16-good", "core-16-untuned"])
def test_many_requests_begin_with_less_loss(name: str) -> None:
    known = speed_at_the_start(name, CPU_COST_PRIOR)
    assert known > speed_at_the_start(name, CostPrior()) + 0.02
    assert known > 0.9


def test_a_single_request_begins_as_well() -> None:
    known = speed_at_the_start("cpu-1-good", CPU_COST_PRIOR)
    assert known > 0.98 * speed_at_the_start("cpu-1-good", CostPrior())
    assert known > 1.2


@pytest.mark.parametrize(
    "name",
    [
        "cpu-1-untuned",
        "cpu-1-near-zero",
        "cpu-16-spread",
        "core-16-good",
        "h100-32-tuned",  # by what it costs like a CPU with matrix units
    ],
)
def test_regret_stays_within_its_limit(name: str) -> None:
    replayed = run(name, CPU_COST_PRIOR, NUM_STEPS)
    assert replayed.regret() <= LIMITS["stationary"]


@pytest.mark.parametrize(
    "name", ["cpu-1-flip", pytest.param("cpu-8-flip", marks=pytest.mark.long)]
)
def test_regret_after_a_change_stays_within_its_limit(name: str) -> None:
    regrets = [
        regret
        for seed in SEEDS
        for regret in regrets_after_changes(
            WORLDS[name], run(name, CPU_COST_PRIOR, NUM_STEPS, seed)
        )
    ]
    assert statistics.fmean(regrets) <= LIMITS["after a change"]
