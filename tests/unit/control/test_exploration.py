"""What is run to learn, and what it may cost."""

import random
from itertools import pairwise
from statistics import fmean

import pytest

from tests.unit.control.known_times import times_of
from tests.unit.control.small_engine import SmallEngine, line_s
from vllm_mtp.control.exploration import (
    EXPLORATION_STEPS,
    EXPLORED_SHARE,
    MAX_SAVED_STEPS,
    SHADOW_PERIOD_STEPS,
    SHADOW_REQUESTS,
    ExplorationCap,
    Situation,
    sampled_goodput,
    shadow_sample,
)
from vllm_mtp.control.goodput import GoodputController
from vllm_mtp.control.options import GoodputOptions
from vllm_mtp.control.planner import Group, Plan
from vllm_mtp.records import DecodeRequest

K_MAX = 8


def test_the_cap_pays_no_more_than_its_share_of_the_time() -> None:
    cap, rng = ExplorationCap(), random.Random(0)
    for _ in range(20_000):
        cap.earn(0.01, 0.01)
        cap.pay(0.01 * rng.choice([0.1, 1.0, 3.0]), 0.01)
    most = EXPLORED_SHARE * 20_000 + MAX_SAVED_STEPS
    assert 0.9 * most < cap.spent_s / 0.01 <= most + 1e-9


def test_what_is_dearer_than_all_that_can_be_saved_is_never_run() -> None:
    cap = ExplorationCap()
    cap.earn(1e6, 0.01)
    assert not cap.pay(0.01 * MAX_SAVED_STEPS * 1.01, 0.01)
    assert cap.pay(0.01 * MAX_SAVED_STEPS, 0.01)
    assert not cap.pay(0.001, 0.01)


REQUESTS = [DecodeRequest(f"r{i}", 100, num_pending_tokens=i) for i in range(20)]


@pytest.mark.parametrize("is_off", [True, False])
def test_the_price_of_an_exploration_contains_its_backfill(is_off: bool) -> None:
    times = times_of([1.0, 1.1], draft=0.1, scale_s=0.01)
    off, drafting = Plan(0, 0.0, 20.0, 0.01, 1.0), Plan(1, 0.0, 30.0, 0.012, 1.5)
    plan, other = (off, drafting) if is_off else (drafting, off)
    free, dear = (
        Situation(plan, times, REQUESTS, token_s).price_s(other, 0.5)
        for token_s in (0.0, 1e-4)
    )
    lost_s = max(other.seconds - other.tokens / plan.goodput, 0.0)
    assert free == pytest.approx(EXPLORATION_STEPS * lost_s + 0.5 * plan.seconds)
    # At most 4 pending tokens a request are made up for in a step.
    tokens = 80 if is_off else EXPLORATION_STEPS * 20
    assert dear - free == pytest.approx(1e-4 * tokens)


def test_a_shadow_draft_that_is_not_verified_costs_its_draft_step() -> None:
    times = times_of([1.0, 1.4], draft=0.1, scale_s=0.01)
    off, draft = Plan(0, 0.0, 20.0, 0.01, 1.0), Plan(1, 0.0, 22.0, 0.015, 1.1)
    now = Situation(off, times, REQUESTS, 0.0)
    assert now.shadow_price_s(draft, ()) == pytest.approx(0.001)
    verified = {"r0", "r1"}
    assert now.shadow_price_s(draft, verified) > 0.001


def test_shadow_drafts_are_verified_of_those_with_the_least_backfill() -> None:
    few = shadow_sample(REQUESTS[::-1], may_mix=True)
    assert few == {f"r{i}" for i in range(SHADOW_REQUESTS)}
    assert len(shadow_sample(REQUESTS, may_mix=False)) == len(REQUESTS)


def test_a_sample_values_a_plan_by_its_own_survival_and_times() -> None:
    groups = [Group(3, [0.9, 0.8]), Group(1, [0.2, 0.1]), Group(1, [0.5, 0.2], 1)]
    times = times_of([1.0, 1.2, 1.4], draft=0.1)
    sampled = [[0.5, 0.25], [0.6, 0.3], [0.4, 0.1]]
    mixed = Plan(2, 0.5, 1.0, 1.0, 1.0)
    tokens = 3 * 1.75 + 1.0 + 1.4
    seconds = times.seconds((3 * 2 + 0 + 1) / 5, 2, False)
    found = sampled_goodput(mixed, groups, sampled, times)
    assert found == pytest.approx(tokens / seconds)


@pytest.mark.parametrize("sees_shadow_drafts", [True, False])
def test_while_drafting_is_disabled_shadow_drafts_come_once_a_period(
    sees_shadow_drafts: bool,
) -> None:
    options = GoodputOptions(sees_shadow_drafts=sees_shadow_drafts)
    engine = SmallEngine(
        GoodputController(K_MAX, options),
        [0.01] * 4,
        sees_shadow_drafts=sees_shadow_drafts,
    ).run(1600)
    drafted = [i for i, d in enumerate(engine.decisions[400:]) if d.draft_depth]
    assert len(drafted) >= 0.7 * 1200 / SHADOW_PERIOD_STEPS
    assert len(drafted) <= 2.5 * 1200 / SHADOW_PERIOD_STEPS
    assert max(b - a for a, b in pairwise(drafted)) < 120


@pytest.mark.parametrize("acceptance", [0.02, 0.4, 0.8])
def test_exploration_costs_about_its_share_by_true_times(acceptance: float) -> None:
    survived = [acceptance**j for j in range(1, K_MAX + 1)]

    def goodput(depth: int) -> float:
        return (1 + sum(survived[:depth])) / line_s(depth, depth)

    best = max(map(goodput, range(K_MAX + 1)))
    shares = []
    for seed in range(4):
        engine = SmallEngine(
            GoodputController(K_MAX), [acceptance] * 4, rng=random.Random(seed)
        ).run(1500)
        explored = [d for d in engine.decisions if d.reason == "explore"]
        assert explored
        lost_s = sum(
            line_s(d.draft_depth, d.draft_depth) * (1 - goodput(d.draft_depth) / best)
            for d in explored
        )
        spent_s = sum(line_s(d.draft_depth, d.draft_depth) for d in engine.decisions)
        shares.append(lost_s / spent_s)
    assert fmean(shares) < 2 * EXPLORED_SHARE
