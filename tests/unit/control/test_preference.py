"""Which of the plans that were found is used."""

import pytest

from vllm_mtp.control.planner import Plan
from vllm_mtp.control.preference import (
    Habit,
    Reluctance,
    best_of_each_depth,
    preferred,
    usual_depth,
)

MARGIN = 0.03


def plan(depth: int, goodput: float) -> Plan:
    return Plan(depth, 0.0, goodput * 0.02, 0.02, goodput)


@pytest.mark.parametrize(
    ("goodputs", "current", "chosen"),
    [
        ({0: 90.0, 1: 100.0, 2: 102.0}, 1, 1),  # not enough better
        ({0: 90.0, 1: 100.0, 2: 104.0}, 1, 2),
        ({0: 99.0, 1: 100.0}, 1, 0),  # too little better than not drafting
        ({0: 97.0, 1: 100.0}, 1, 1),
        ({0: 100.0, 1: 102.5}, 0, 0),  # what rests goes on resting
        ({0: 100.0, 1: 103.5}, 0, 1),
        # What beats the draft length in use must beat not drafting, too.
        ({0: 103.0, 1: 100.0, 2: 104.0}, 1, 0),
    ],
)
def test_drafting_must_be_worth_it(
    goodputs: dict[int, float], current: int, chosen: int
) -> None:
    found = [plan(depth, goodput) for depth, goodput in goodputs.items()]
    now = plan(current, 1.0)
    assert preferred(found, now, MARGIN, catch_up_s=0.0).depth == chosen


def test_where_drafting_may_not_rest_the_best_depth_is_used() -> None:
    found = [plan(1, 100.0), plan(2, 104.0)]
    assert preferred(found, plan(1, 1.0), MARGIN, catch_up_s=0.0).depth == 2
    assert preferred(found[:1], plan(1, 1.0), MARGIN, catch_up_s=0.0).depth == 1


def test_catching_up_must_be_earned_back() -> None:
    found = [plan(0, 100.0), plan(1, 103.5)]
    assert preferred(found, plan(0, 1.0), MARGIN, catch_up_s=0.02).depth == 0


def test_the_usual_depth_is_the_shortest_of_those_that_are_as_good() -> None:
    found = [plan(0, 200.0), plan(1, 90.0), plan(2, 99.0), plan(3, 100.0)]
    assert usual_depth(found) == 2
    assert usual_depth(found[:2]) == 1
    assert usual_depth(found[:1]) == 0
    mixed = Plan(4, 0.5, 4.0, 0.02, 200.0)
    assert usual_depth([*found, mixed]) == 2


def test_each_time_drafting_is_resumed_the_next_must_promise_more() -> None:
    reluctance, margins = Reluctance(), []
    for _ in range(6):
        margins.append(reluctance.margin(0.03))
        reluctance.resumed()
    assert margins == pytest.approx([0.03, 0.06, 0.09, 0.12, 0.12, 0.12])
    reluctance.pass_steps(5000)
    assert reluctance.margin(0.03) == pytest.approx(0.03, abs=0.001)


def test_drafting_goes_on_until_it_has_lost_what_coming_back_costs() -> None:
    habit = Habit(None)
    losing = [plan(0, 100.0), plan(1, 97.0)]
    for _ in range(4):
        habit.drafted(losing, num_steps=8)
    # (1 - 97 / 102) x 32 = 1.6 steps
    assert habit.lost_steps == pytest.approx(1.57, abs=0.01)
    assert habit.is_patient
    habit.drafted(losing, num_steps=16)
    assert not habit.is_patient
    # An easy stretch makes up for it, and more than that is not credited.
    habit.drafted([plan(0, 100.0), plan(1, 130.0)], num_steps=16)
    assert habit.lost_steps == 0.0
    assert habit.is_patient


def test_who_has_often_come_back_in_vain_is_less_patient() -> None:
    habit = Habit(None)
    habit.drafted([plan(0, 100.0), plan(1, 97.0)], num_steps=24)
    assert habit.is_patient
    for _ in range(2):
        habit.reluctance.resumed()
    assert not habit.is_patient
    habit.resumed()
    assert habit.lost_steps == 0.0


def test_patience_is_for_those_who_draft() -> None:
    found = [plan(0, 100.0), plan(1, 97.0), plan(2, 95.0)]
    assert preferred(found, plan(1, 1.0), MARGIN, 0.0).depth == 0
    assert preferred(found, plan(1, 1.0), MARGIN, 0.0, is_patient=True).depth == 1
    assert preferred(found, plan(0, 1.0), MARGIN, 0.0, is_patient=True).depth == 0
    # Where nothing else keeps the promised latency there is no choice.
    assert preferred(found[:1], plan(1, 1.0), MARGIN, 0.0, is_patient=True).depth == 0


def test_a_rule_is_as_good_as_the_better_of_two_ways_to_plan_it() -> None:
    ruled = Plan(1, 0.4, 2.1, 0.02, 105.0)
    found = best_of_each_depth([plan(0, 100.0), plan(1, 97.0), plan(2, 96.0), ruled])
    assert {(p.depth, p.goodput) for p in found} == {
        (0, 100.0),
        (1, 105.0),
        (2, 96.0),
    }
    assert preferred(found, plan(1, 97.0), MARGIN, 0.0) is ruled
