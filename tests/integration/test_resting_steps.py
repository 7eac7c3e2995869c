"""Which steps need no decision."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_mtp.integration.resting_steps import MAX_STEPS, RestingSteps
from vllm_mtp.integration.scheduled_steps import ScheduledStep

LAST = ScheduledStep(2, 2, 2, 0, 100, 0, 0)


def output(rows: dict[str, int], **facts: Any) -> Any:
    usual = {
        "num_scheduled_tokens": rows,
        "total_num_scheduled_tokens": sum(rows.values()),
        "scheduled_spec_decode_tokens": {},
        "scheduled_cached_reqs": SimpleNamespace(resumed_req_ids=set()),
    }
    return SimpleNamespace(**usual | facts)


def resting(num_steps: int = MAX_STEPS) -> RestingSteps:
    steps = RestingSteps()
    steps.may_begin(frozenset("ab"), LAST)
    steps.begin(num_steps)
    return steps


def test_the_same_batch_goes_on_for_so_many_steps() -> None:
    steps = resting(100)
    contexts = []
    while (step := steps.goes_on(output({"b": 1, "a": 1}))) is not None:
        contexts.append(step.num_context_tokens)
    assert contexts == [102 + 2 * i for i in range(MAX_STEPS)]
    assert steps.num_scheduled == MAX_STEPS
    steps.told()
    steps.begin(5)
    assert steps.num_left == 0  # a decision comes first


@pytest.mark.parametrize(
    "other",
    [
        output({"a": 1}),
        output({"a": 1, "b": 1, "c": 1}),
        output({"a": 1, "c": 1}),
        output({"a": 2, "b": 1}),
        output({"a": 1, "b": 1}, scheduled_spec_decode_tokens={"a": [1]}),
        output(
            {"a": 1, "b": 1},
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids={"a"}),
        ),
    ],
)
def test_another_batch_needs_a_decision(other: Any) -> None:
    assert resting().goes_on(other) is None


def test_nothing_rests_before_a_step_that_may_be_repeated() -> None:
    steps = RestingSteps()
    steps.begin(5)
    assert steps.goes_on(output({"a": 1, "b": 1})) is None
    steps = resting()
    steps.end()
    steps.begin(5)
    assert steps.goes_on(output({"a": 1, "b": 1})) is None
