"""A change of depth must pay for itself in the time it is expected to last."""

import pytest

from vllm_mtp.control.hysteresis import DWELL_STEPS, SWITCH_STEPS, Hysteresis
from vllm_mtp.control.planner import Plan


def plan(depth: int, goodput: float) -> Plan:
    """Of steps of 10 ms."""
    return Plan(depth, 0.0, goodput * 0.01, 0.01, 1.0)


NEEDED = SWITCH_STEPS / DWELL_STEPS
"""Gain that pays for a change at first."""


@pytest.mark.parametrize(("gain", "is_enough"), [(0.5, False), (1.5, True)])
def test_a_small_gain_is_not_worth_a_change(gain: float, is_enough: bool) -> None:
    found = [plan(2, 100.0), plan(3, 100.0 * (1 + gain * NEEDED))]
    assert Hysteresis().choose(found, 2, 0.0).depth == (3 if is_enough else 2)


def test_where_depths_change_often_a_change_must_gain_more() -> None:
    often = Hysteresis()
    for _ in range(12):
        often.pass_steps(4)
        often.changed()
    found = [plan(2, 100.0), plan(3, 100.0 * (1 + 4 * NEEDED))]
    assert Hysteresis().choose(found, 2, 0.0).depth == 3
    assert often.choose(found, 2, 0.0).depth == 2
    often.pass_steps(2000)  # and then it has stayed for long
    assert often.choose(found, 2, 0.0).depth == 3


def test_kv_backfill_counts_where_drafting_resumes_and_only_there() -> None:
    worth = 100.0 * (1 + 2 * NEEDED)
    found = [plan(0, 100.0), plan(2, worth), plan(3, worth * (1 + 2 * NEEDED))]
    backfill_s = 0.01 * DWELL_STEPS * 0.1
    assert Hysteresis().choose(found, 0, 0.0).depth == 3
    assert Hysteresis().choose(found, 0, backfill_s).depth == 0
    assert Hysteresis().choose(found, 2, backfill_s).depth == 3


def test_a_depth_that_is_no_longer_allowed_is_left_at_once() -> None:
    found = [plan(2, 100.0), plan(3, 90.0)]
    assert Hysteresis().choose(found, 8, 0.0).depth == 2
