"""Which steps need no decision."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_mtp.integration.scheduler.scheduled_steps import ScheduledStep
from vllm_mtp.integration.scheduler.undecided_steps import MAX_STEPS, RestingSteps

LAST = ScheduledStep(2, 2, 2, 0, 100, 0, 0, is_greedy=False)


def output(
    rows: dict[str, int], resumed: frozenset[str] = frozenset(), **facts: Any
) -> Any:
    usual = {
        "total_num_scheduled_tokens": sum(rows.values()),
        "scheduled_spec_decode_tokens": {},
        "scheduled_cached_reqs": SimpleNamespace(
            req_ids=[*rows], resumed_req_ids=resumed
        ),
    }
    return SimpleNamespace(**usual | facts)


def resting(num_steps: int = MAX_STEPS) -> RestingSteps:
    steps = RestingSteps()
    steps.may_begin(["a", "b"], LAST)
    steps.begin(num_steps)
    return steps


def test_the_same_batch_goes_on_for_so_many_steps() -> None:
    steps = resting(100)
    while steps.goes_on(output({"a": 1, "b": 1})):
        assert steps.are_under_way
        steps.ended(0.001 * steps.num_scheduled)
        assert not steps.are_under_way
    assert steps.num_scheduled == MAX_STEPS
    outcomes = steps.outcomes()
    assert [o.num_context_tokens for o in outcomes] == [
        102 + 2 * i for i in range(MAX_STEPS)
    ]
    assert [o.step_time_s for o in outcomes] == steps.seconds
    assert not any(o.is_greedy for o in outcomes)
    assert all(
        o.num_requests == o.num_decode_requests == o.num_scheduled_tokens == 2
        for o in outcomes
    )
    steps.begin(5)
    assert steps.num_left == 0  # first these are told,
    steps.told()
    assert not steps.outcomes()
    steps.begin(5)
    assert steps.num_left == 0  # and one is decided


def test_an_output_that_comes_when_all_was_told_changes_nothing() -> None:
    """Steps overlap: the batch of a step that is under way may be over."""
    steps = resting()
    for _ in range(2):
        assert steps.goes_on(output({"a": 1, "b": 1}))
    steps.ended(0.25)
    assert [o.step_time_s for o in steps.outcomes()] == [0.25]
    steps.told()
    steps.ended(0.5)
    assert not steps.outcomes()
    assert not steps.are_under_way


@pytest.mark.parametrize(
    "other",
    [
        output({"a": 1}),
        output({"a": 1, "b": 1, "c": 1}),
        output({"a": 1, "c": 1}),
        output({"a": 2, "b": 1}),
        output({"a": 1, "b": 1}, scheduled_spec_decode_tokens={"a": [1]}),
        output({"a": 1, "b": 1}, resumed=frozenset("a")),
        output({"b": 1, "a": 1}),
    ],
)
def test_another_batch_needs_a_decision(other: Any) -> None:
    assert not resting().goes_on(other)


def test_nothing_rests_before_a_step_that_may_be_repeated() -> None:
    steps = RestingSteps()
    steps.begin(5)
    assert not steps.goes_on(output({"a": 1, "b": 1}))
    steps = resting()
    steps.end()
    steps.begin(5)
    assert not steps.goes_on(output({"a": 1, "b": 1}))
