"""From scheduled steps to outcomes: sizes, times, and tokens that wait."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mtp.control.catching_up import caught_up_now
from vllm_mtp.integration.scheduler import scheduled_steps
from vllm_mtp.integration.scheduler.scheduled_steps import (
    CaughtUp,
    ScheduledStep,
    StepOutcomes,
    UnseenCounts,
)
from vllm_mtp.records import RequestOutcome


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(scheduled_steps, "time", clock)
    return clock


def step(depth: int, catch_up: int = 0) -> ScheduledStep:
    return ScheduledStep(3, 9, 2, 5, 700, depth, catch_up, is_greedy=False)


def test_an_outcome_holds_what_was_scheduled_and_what_came_of_it(clock: Clock) -> None:
    outcomes = StepOutcomes(drafts_after_output=False)
    outcomes.begin(step(depth=2, catch_up=11))
    clock.now_s += 0.5
    outcomes.add(RequestOutcome("a", 2, 1))
    outcome = outcomes.take()
    assert outcome.requests == (RequestOutcome("a", 2, 1),)
    assert outcome.step_time_s == pytest.approx(0.5)
    assert (outcome.num_requests, outcome.num_scheduled_tokens) == (3, 9)
    assert (outcome.num_decode_requests, outcome.num_prefill_tokens) == (2, 5)
    assert (outcome.num_context_tokens, outcome.draft_depth) == (700, 2)
    assert outcome.num_catch_up_tokens == 11
    assert not outcome.is_greedy
    outcomes.begin(step(depth=0))
    assert outcomes.take().requests == ()  # each outcome is told once


def test_deciding_and_learning_are_part_of_steps(clock: Clock) -> None:
    outcomes = StepOutcomes(drafts_after_output=False)
    outcomes.scheduling()
    clock.now_s += 0.2  # the controller decides
    outcomes.begin(step(1))
    clock.now_s += 0.5
    assert outcomes.take().step_time_s == pytest.approx(0.7)
    with outcomes.learning():
        clock.now_s += 0.3
    clock.now_s += 5.0  # idle
    for expected_s in (0.9, 0.6):  # what was learned counts once
        outcomes.scheduling()
        clock.now_s += 0.1
        outcomes.begin(step(1))
        clock.now_s += 0.5
        assert outcomes.take().step_time_s == pytest.approx(expected_s)


def test_what_lies_between_two_outputs_counts_once(clock: Clock) -> None:
    """Overlapping steps: learning goes on beside them."""
    outcomes = StepOutcomes(drafts_after_output=False)
    outcomes.begin(step(1))
    outcomes.begin(step(1))
    clock.now_s += 0.5
    outcomes.take()
    with outcomes.learning():
        clock.now_s += 0.3
    clock.now_s += 0.1
    assert outcomes.take().step_time_s == pytest.approx(0.4)


def test_overlapping_steps_are_timed_from_output_to_output(clock: Clock) -> None:
    outcomes = StepOutcomes(drafts_after_output=False)
    outcomes.begin(step(1))
    clock.now_s += 0.1
    outcomes.begin(step(2))
    clock.now_s += 0.3
    assert outcomes.take().step_time_s == pytest.approx(0.4)
    clock.now_s += 0.2
    second = outcomes.take()
    assert second.step_time_s == pytest.approx(0.2)
    assert second.draft_depth == 2
    clock.now_s += 5.0  # idle: nobody asked for anything
    outcomes.begin(step(3))
    clock.now_s += 0.1
    assert outcomes.take().step_time_s == pytest.approx(0.1)


def test_steps_at_rest_keep_their_place_among_those_that_overlap(clock: Clock) -> None:
    outcomes = StepOutcomes(drafts_after_output=True)
    outcomes.begin(step(1))
    clock.now_s += 0.1
    outcomes.begin_resting()
    assert not outcomes.next_is_resting
    clock.now_s += 0.1
    assert outcomes.take().step_time_s == pytest.approx(0.2)
    assert outcomes.next_is_resting
    outcomes.begin(step(2))
    clock.now_s += 0.3
    assert outcomes.take_resting() == pytest.approx(0.3)
    assert not outcomes.next_is_resting
    clock.now_s += 0.4
    assert outcomes.take().step_time_s == pytest.approx(0.4)
    assert not outcomes.next_is_resting


def test_where_drafts_follow_the_output_their_time_is_in_the_next_step() -> None:
    outcomes = StepOutcomes(drafts_after_output=True)
    depths = []
    for depth in (1, 2, 3, 0):
        outcomes.begin(step(depth, catch_up=10 * depth))
        outcome = outcomes.take()
        depths.append((outcome.draft_depth, outcome.num_catch_up_tokens))
    assert depths == [(1, 10), (1, 10), (2, 20), (3, 30)]


def test_tokens_wait_while_drafting_is_off_and_are_caught_up_once() -> None:
    counts = UnseenCounts()
    assert counts.catch_up("ab") == CaughtUp(0, frozenset())
    counts.rest("ab")
    counts.rest("ab")
    counts.rest("ac")
    assert [counts.of(i) for i in "abcd"] == [3, 3, 1, 0]
    assert counts.catch_up("ad") == CaughtUp(3, frozenset())
    assert [counts.of(i) for i in "abcd"] == [0, 3, 1, 0]
    counts.rest("a")
    counts.forget("b")
    assert counts.catch_up("abc") == CaughtUp(3, frozenset())


def test_a_long_backlog_is_caught_up_in_parts_the_fewest_tokens_first() -> None:
    counts = UnseenCounts()
    for step in range(100):
        counts.rest("ab" if step < 70 else "abc")
    # 128 a step: the youngest, then one of the two others, then the last.
    assert counts.catch_up("bca") == CaughtUp(30, frozenset("ab"))
    assert counts.catch_up("bca") == CaughtUp(100, frozenset("b"))
    assert counts.catch_up("bca") == CaughtUp(100, frozenset())


@given(st.dictionaries(st.text("abcdef", min_size=1), st.integers(0, 300), min_size=1))
def test_every_backlog_ends_and_no_step_catches_up_on_much(
    waiting: dict[str, int],
) -> None:
    limit = max(128, 4 * len(waiting))
    for _ in range(2 * len(waiting)):
        chosen = caught_up_now(waiting)
        assert chosen
        assert {i for i, count in waiting.items() if not count} <= set(chosen)
        caught_up = sum(waiting[i] for i in chosen)
        most = max(waiting[i] for i in chosen)
        assert caught_up <= limit or caught_up == most
        waiting = {i: 0 if i in chosen else n for i, n in waiting.items()}
    assert not any(waiting.values())
