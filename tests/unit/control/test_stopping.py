"""Prices of drafting under a plan, and when a decision leaves the length to a rule."""

import random

import pytest

from tests.unit.control.known_times import times_of
from tests.unit.control.small_engine import SmallEngine, line_s
from vllm_mtp.control.goodput import GoodputController
from vllm_mtp.control.options import GoodputOptions
from vllm_mtp.control.planner import Plan
from vllm_mtp.control.stopping import STEP_MARGIN, StepMargins, prices
from vllm_mtp.records import DecodeRequest

K_MAX = 4


def plan_of(goodput: float, depth: int = 2) -> Plan:
    return Plan(depth, 0.0, goodput, 1.0, 1.0)


def test_of_a_single_request_every_length_has_its_own_price() -> None:
    times = times_of([1.0, 1.5, 1.4, 1.3, 1.6], draft=0.2, scale_s=0.01)
    found = prices(plan_of(150.0), times, num_requests=1, depth=K_MAX, margin=1.6)
    # 150 tokens a second, steps of 10 ms: 1.5 tokens for each unit.
    assert found.verify == pytest.approx([0.0, 0.75, 0.6, 0.45, 0.9])
    assert found.step == pytest.approx(1.6 * 0.3)


def test_of_many_requests_each_row_has_the_same_price() -> None:
    times = times_of([1.0, 9.0, 9.8, 10.6, 11.4], draft=0.2, scale_s=0.01)
    found = prices(plan_of(1000.0), times, num_requests=8, depth=3, margin=1.0)
    # A token of all eight takes 8 ms, of one 1 ms.
    assert found.verify == pytest.approx([0.0, 1.0, 2.0, 3.0])


def test_rows_that_seem_to_save_time_are_free_not_paid_for() -> None:
    times = times_of([1.0, 0.99, 0.98, 0.97, 0.96], draft=-0.2)
    found = prices(plan_of(100.0), times, num_requests=8, depth=2, margin=1.0)
    assert found.verify == [0.0, 0.0, 0.0]
    assert found.step == 0.0


@pytest.mark.parametrize("scale", [1.0, 1.5, 3.0])
def test_the_margin_makes_drafts_as_deep_as_wanted_in_the_mean(scale: float) -> None:
    """Whatever is wrong with prices, within bounds."""
    rng, margins, depths = random.Random(0), StepMargins(), []
    for _ in range(1200):
        worth = 4.0 * rng.random()
        depth = 1 + sum(worth > 0.4 * k * scale * margins.of(4) for k in (1, 2, 3, 4))
        margins.learn(4, depth, wanted=2)
        depths.append(depth)
    assert sum(depths[200:]) / 1000 == pytest.approx(2.0, abs=0.1)
    assert margins.of(8) == StepMargins().of(8)  # others are left alone


def test_the_margin_stays_within_bounds() -> None:
    margins = StepMargins()
    for _ in range(1000):
        margins.learn(1, 8, wanted=1)
        margins.learn(2, 1, wanted=8)
    assert margins.of(1) == 2.5 * STEP_MARGIN
    assert margins.of(2) == STEP_MARGIN / 2.5


def settled(acceptance: float = 0.8, **options: object) -> SmallEngine:
    controller = GoodputController(
        K_MAX,
        GoodputOptions(stops_early=True, **options),  # type: ignore[arg-type]
    )
    engine = SmallEngine(controller, [acceptance] * 3, rng=random.Random(0))
    return engine.run(400)


def test_where_it_drafts_the_worker_has_the_last_word_except_in_explorations() -> None:
    engine = settled()
    kinds = {(d.reason, d.stop_rule is not None) for d in engine.decisions[20:]}
    assert kinds == {("exploit", True), ("explore", False)}
    ruled = next(d for d in engine.decisions if d.stop_rule is not None)
    assert ruled.stop_rule is not None
    assert ruled.draft_depth == K_MAX
    assert set(ruled.stop_rule.chances) == set(ruled.num_draft_tokens)
    assert len(ruled.stop_rule.verify_prices) == K_MAX + 1


def test_a_worker_that_drafts_deeper_than_is_best_pays_more_for_a_step() -> None:
    """This one makes all draft steps whatever they cost."""
    controller = settled(0.3).controller
    assert isinstance(controller, GoodputController)
    rules, requests = [], [DecodeRequest(f"r{i}", 500) for i in range(3)]
    while len(rules) < 2:
        controller.may_draft()
        decision = controller.decide(requests)
        if decision.stop_rule is not None:
            rules.append(decision.stop_rule)
    found, plan = controller._found, controller.plan
    assert found is not None
    assert plan is not None
    step_s = found.times.seconds(0.0, 2) - found.times.seconds(0.0, 1)
    price = plan.goodput * step_s
    assert rules[0].step_price == pytest.approx(2.5 * STEP_MARGIN * price, rel=0.2)


def test_workers_that_cannot_stop_get_no_rule() -> None:
    engine = SmallEngine(GoodputController(K_MAX), [0.8] * 3).run(200)
    assert all(decision.stop_rule is None for decision in engine.decisions)


def test_a_bound_on_latency_bounds_the_rule_as_well() -> None:
    deepest = {}
    for bound_s in (None, line_s(2, 2) / 1.39):
        engine = settled(0.3, max_token_latency_s=bound_s)
        ruled = [d.draft_depth for d in engine.decisions[200:] if d.stop_rule]
        deepest[bound_s is None] = max(ruled)
    assert deepest[True] == K_MAX
    assert deepest[False] < K_MAX


def test_requests_that_are_switched_off_leave_the_rule_to_the_others() -> None:
    controller = settled().controller
    requests = [DecodeRequest("r0", 100), DecodeRequest("off", 100, True, 0)]
    decisions = []
    for _ in range(20):
        controller.may_draft()
        decisions.append(controller.decide(requests))
    ruled = [d for d in decisions if d.stop_rule is not None]
    assert ruled
    assert all(set(d.stop_rule.chances) == {"r0"} for d in ruled if d.stop_rule)
    assert all(d.num_draft_tokens["off"] == 0 for d in decisions)
    only_off = controller.decide([DecodeRequest("off", 100, True, 0)])
    assert (only_off.draft_depth, only_off.stop_rule) == (0, None)


def test_pins_are_kept_as_they_are() -> None:
    engine = settled()
    controller = engine.controller
    requests = [DecodeRequest("r0", 100), DecodeRequest("pinned", 100, True, 3)]
    for _ in range(20):
        controller.may_draft()
        decision = controller.decide(requests)
        assert decision.stop_rule is None
        assert decision.num_draft_tokens["pinned"] == 3
