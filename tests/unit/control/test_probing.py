"""Which plan is tried next."""

from typing import Any

import pytest

from vllm_mtp.control.exploration import ExplorationOptions
from vllm_mtp.control.planner import Plan
from vllm_mtp.control.probing import Probing, Situation
from vllm_mtp.control.step_times import Estimate
from vllm_mtp.records import DecodeRequest

MARGIN = 0.03
NO_TIMES: Any = None
"""Only asked for from K = 0."""


class LineTimes:
    def uniform(self, draft_length: int, depth: int) -> Estimate:
        return Estimate(0.020 + 0.001 * draft_length + 0.001 * depth, 0.01)


def batch(unseen: list[int]) -> list[DecodeRequest]:
    return [DecodeRequest(f"r{i}", 500, True, None, n) for i, n in enumerate(unseen)]


def plan(depth: int, goodput: float, with_luck: float) -> Plan:
    return Plan(depth, 0.0, goodput * 0.02, 0.02, with_luck)


@pytest.mark.parametrize(
    ("other", "is_tried"),
    [
        (plan(0, 79.0, with_luck=98.5), True),
        (plan(0, 79.0, with_luck=97.5), False),
        (plan(0, 81.0, with_luck=81.5), True),
        (plan(2, 97.0, with_luck=104.0), True),
        (plan(2, 97.0, with_luck=102.0), False),
    ],
)
def test_a_plan_is_tried_that_would_be_changed_to_with_luck(
    other: Plan, is_tried: bool
) -> None:
    """K = 0 is changed to for less than another depth is, so it is tried for less, and
    where it is nearly as good without luck, too."""
    probing = Probing(ExplorationOptions(), MARGIN, compares_drafts=False)
    now = Situation(plan(1, 100.0, with_luck=110.0), NO_TIMES, (), 0.0)
    probing.look_for([now.plan, other], now)
    probe = probing.step(now)
    assert (probe is not None and probe.plan == other) == is_tried


def test_not_drafting_is_tried_before_other_depths_but_not_twice_in_a_row() -> None:
    """However much more the other one promises."""
    probing = Probing(ExplorationOptions(), MARGIN, compares_drafts=False)
    now = Situation(plan(1, 100.0, with_luck=110.0), NO_TIMES, (), 0.0)
    found = [now.plan, plan(0, 96.0, with_luck=99.0), plan(2, 99.0, with_luck=130.0)]
    tried = []
    for _ in range(4):
        probing.look_for(found, now)
        probe = probing.step(now)
        assert probe is not None
        tried.append(probe.plan.depth)
        while not probing.is_over:
            probing.step(now)
    assert tried == [0, 2, 0, 2]


def test_not_drafting_is_tried_again_where_it_is_nearly_as_good() -> None:
    """Also when nothing else is worth a try."""
    probing = Probing(ExplorationOptions(), MARGIN, compares_drafts=False)
    now = Situation(plan(1, 100.0, with_luck=110.0), NO_TIMES, (), 0.0)
    for _ in range(3):
        probing.look_for([now.plan, plan(0, 90.0, with_luck=91.0)], now)
        probe = probing.step(now)
        assert probe is not None
        assert probe.plan.depth == 0
        while not probing.is_over:
            probing.step(now)


def steps_until_it_probes(probing: Probing, now: Situation) -> int:
    probing.look_for([now.plan, plan(1, 80.0, with_luck=120.0)], now)
    for steps in range(1000):
        if probing.may_draft_while_off(now):
            assert probing.step(now) is not None, "announced"
            return steps
    raise AssertionError("it never does")


@pytest.mark.parametrize(
    ("unseen", "num_waited"),
    [([2] * 8, 0), ([3] * 8, 64), ([0] * 7 + [40], 64), ([40], 64), ([20], 0)],
)
@pytest.mark.parametrize("compares_drafts", [True, False])
def test_from_off_a_probe_waits_for_requests_that_need_little_catching_up(
    unseen: list[int], num_waited: int, compares_drafts: bool
) -> None:
    """But not for ever: there may be a single long one."""
    options = ExplorationOptions(grant_lasts_steps=0, pause_steps=0)
    probing = Probing(options, MARGIN, compares_drafts)
    times: Any = LineTimes()
    now = Situation(plan(0, 50.0, with_luck=50.0), times, batch(unseen), 2e-4)
    assert steps_until_it_probes(probing, now) == num_waited


@pytest.mark.parametrize("catch_up_token_s", [0.0, 2e-4])
def test_now_and_then_later_tokens_are_probed_as_well(catch_up_token_s: float) -> None:
    """Where requests begin so often that no probe ever had to wait for one."""
    options = ExplorationOptions(grant_lasts_steps=0, pause_steps=0)
    probing = Probing(options, MARGIN, compares_drafts=True)
    times: Any = LineTimes()
    probed = []
    for step in range(20000):
        requests = batch([step % 40] * 8)
        now = Situation(plan(0, 50.0, 50.0), times, requests, catch_up_token_s)
        probing.look_for([now.plan, plan(1, 40.0, with_luck=60.0)], now)
        probing.budget.earn(is_comparing=True)
        if probing.may_draft_while_off(now) and probing.step(now) is not None:
            probed.append(step % 40 > 2)
    assert len(probed) > 20
    assert sum(probed) > 0.1 * len(probed)


def test_after_a_surprise_no_probe_waits() -> None:
    options = ExplorationOptions(grant_lasts_steps=0)
    probing = Probing(options, MARGIN, compares_drafts=False)
    times: Any = LineTimes()
    now = Situation(plan(0, 50.0, with_luck=50.0), times, batch([40, 40]), 2e-4)
    probing.budget.surprise()
    assert steps_until_it_probes(probing, now) == 0


@pytest.mark.parametrize(("survival", "is_compared"), [(0.02, True), (0.15, False)])
def test_what_is_cheapest_tells_what_would_be_accepted(
    survival: float, is_compared: bool
) -> None:
    """Verifying costs more than comparing, but what is accepted is no loss."""
    probing = Probing(ExplorationOptions(), MARGIN, compares_drafts=True)
    times: Any = LineTimes()
    now = Situation(plan(0, 50.0, with_luck=50.0), times, batch([0]), 0.0)
    other = Plan(1, 0.0, 1.0 + survival, 0.022, 99.0)
    probing.look_for([now.plan, other], now)
    probe = probing.step(now)
    assert probe is not None
    assert probe.compares == is_compared
