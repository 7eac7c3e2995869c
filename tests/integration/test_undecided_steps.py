"""Which steps need no decision."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_mtp.integration.scheduler.undecided_steps import MAX_STEPS, UndecidedSteps


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


def undecided(num_steps: int = MAX_STEPS) -> UndecidedSteps:
    steps = UndecidedSteps()
    steps.may_begin(["a", "b"])
    steps.begin(num_steps)
    return steps


def test_the_same_batch_goes_on_for_so_many_steps() -> None:
    steps = undecided(100)
    count = 0
    while steps.goes_on(output({"a": 1, "b": 1})):
        count += 1
    assert count == steps.take() == MAX_STEPS
    assert steps.take() == 0
    steps.begin(5)
    assert steps.num_left == 5  # once they are delivered, more may follow


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
    assert not undecided().goes_on(other)


def test_every_step_is_decided_before_one_that_may_be_repeated() -> None:
    steps = UndecidedSteps()
    steps.begin(5)
    assert not steps.goes_on(output({"a": 1, "b": 1}))
    steps = undecided()
    steps.end()
    steps.begin(5)
    assert not steps.goes_on(output({"a": 1, "b": 1}))
