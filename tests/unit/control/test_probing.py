"""Which plan is tried next."""

from typing import Any

import pytest

from vllm_mtp.control.exploration import ExplorationOptions
from vllm_mtp.control.planner import Plan
from vllm_mtp.control.probing import Probing, Situation

MARGIN = 0.03
NO_TIMES: Any = None
"""Only asked for from K = 0."""


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
