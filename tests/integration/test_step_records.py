"""From scheduled steps to their outcomes: sizes, times, and pending tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mtp.control.kv_backfill import backfilled_now
from vllm_mtp.integration.scheduler import step_records
from vllm_mtp.integration.scheduler.messages import Choice
from vllm_mtp.integration.scheduler.pending_counts import (
    Backfill,
    PendingCounts,
)
from vllm_mtp.integration.scheduler.step_records import StepRecords
from vllm_mtp.records import RequestOutcome, StepOutcome


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(step_records, "time", clock)
    return clock


def step(depth: int, backfill: int = 0) -> StepOutcome:
    return StepOutcome(
        requests=(),
        num_requests=3,
        num_scheduled_tokens=9,
        step_time_s=0.0,
        draft_depth=depth,
        num_decode_requests=2,
        num_prefill_tokens=5,
        num_context_tokens=700,
        num_backfill_tokens=backfill,
        is_greedy=False,
    )


def close(records: StepRecords) -> StepOutcome:
    """The oldest step's output is here and taken up at once."""
    records.updated(records.close())
    ((_, (outcome,)),) = records.take()
    return outcome


def test_a_record_holds_what_was_scheduled_and_what_came_of_it(clock: Clock) -> None:
    records = StepRecords(drafts_after_output=False)
    records.open(step(depth=2, backfill=11))
    clock.now_s += 0.5
    record = records.close()
    record.verified = [RequestOutcome("a", 2, 1)]
    record.shadow_drafts.append(RequestOutcome("b", 1, 0))
    records.updated(record)
    ((is_decided, (taken,)),) = records.take()
    assert is_decided
    assert taken == step(depth=2, backfill=11)._replace(
        step_time_s=pytest.approx(0.5),
        requests=(RequestOutcome("a", 2, 1),),
        shadow_drafts=(RequestOutcome("b", 1, 0),),
    )
    assert not list(records.take()), "each is delivered once"


def test_deciding_learning_and_taking_up_are_part_of_steps(clock: Clock) -> None:
    records = StepRecords(drafts_after_output=False)
    clock.now_s += 5.0  # idle
    records.scheduling()
    clock.now_s += 0.2  # the controller learns and decides
    records.open(step(1))
    clock.now_s += 0.5
    record = records.close()
    assert record.step_time_s == pytest.approx(0.7), "where it is delivered at once"
    clock.now_s += 0.1
    records.updated(record)
    assert record.step_time_s == pytest.approx(0.8)


def test_overlapping_steps_are_timed_from_output_to_output(clock: Clock) -> None:
    records = StepRecords(drafts_after_output=False)
    records.open(step(1))
    clock.now_s += 0.1
    records.open(step(2))
    clock.now_s += 0.3
    assert close(records).step_time_s == pytest.approx(0.4)
    clock.now_s += 0.2
    second = close(records)
    assert second.step_time_s == pytest.approx(0.2)
    assert second.draft_depth == 2
    clock.now_s += 5.0  # idle: nobody asked for anything
    records.open(step(3))
    clock.now_s += 0.1
    assert close(records).step_time_s == pytest.approx(0.1)


def test_undecided_steps_keep_their_place_and_their_context_grows() -> None:
    records = StepRecords(drafts_after_output=False)
    records.open(step(0))
    for _ in range(2):
        records.open_repeated()
    records.open(step(1))
    for _ in range(4):
        records.updated(records.close())
    parts = list(records.take())
    assert [(decided, len(some)) for decided, some in parts] == [
        (True, 1),
        (False, 2),
        (True, 1),
    ]
    assert [o.num_context_tokens for o in parts[1][1]] == [703, 706]


def test_a_stop_rule_corrects_the_depth_of_the_last_closed_step() -> None:
    records = StepRecords(drafts_after_output=False)
    records.drafted(3)  # nothing is closed: of no step
    records.open(step(5))
    records.updated(records.close())
    records.drafted(2)
    ((_, (outcome,)),) = records.take()
    assert outcome.draft_depth == 2


def test_where_drafts_follow_the_output_their_time_is_in_the_next_step() -> None:
    records = StepRecords(drafts_after_output=True)
    depths = []
    for depth in (1, 2, 3, 0):
        records.open(step(depth, backfill=10 * depth))
        outcome = close(records)
        depths.append((outcome.draft_depth, outcome.num_backfill_tokens))
    assert depths == [(1, 10), (1, 10), (2, 20), (3, 30)]


def test_tokens_are_pending_while_drafting_is_disabled_and_backfilled_once() -> None:
    counts = PendingCounts()
    assert counts.backfill("ab") == Backfill(0, frozenset())
    counts.add("ab")
    counts.add("ab")
    counts.add("ac")
    assert [counts.of(i) for i in "abcd"] == [3, 3, 1, 0]
    assert counts.backfill("ad") == Backfill(3, frozenset())
    assert [counts.of(i) for i in "abcd"] == [0, 3, 1, 0]
    counts.add("a", num_steps=2)
    counts.forget("b")
    assert counts.backfill("abc") == Backfill(5, frozenset())


def test_many_pending_tokens_are_backfilled_in_parts_the_fewest_first() -> None:
    counts = PendingCounts()
    for step in range(100):
        counts.add("ab" if step < 70 else "abc")
    # 128 a step: the youngest, then one of the two others, then the last.
    assert counts.backfill("bca") == Backfill(30, frozenset("ab"))
    assert counts.backfill("bca") == Backfill(100, frozenset("b"))
    assert counts.backfill("bca") == Backfill(100, frozenset())


@given(st.dictionaries(st.text("abcdef", min_size=1), st.integers(0, 300), min_size=1))
def test_every_backlog_ends_and_no_step_backfills_much(
    waiting: dict[str, int],
) -> None:
    limit = max(128, 4 * len(waiting))
    for _ in range(2 * len(waiting)):
        chosen = backfilled_now(waiting)
        assert chosen
        assert {i for i, count in waiting.items() if not count} <= set(chosen)
        caught_up = sum(waiting[i] for i in chosen)
        most = max(waiting[i] for i in chosen)
        assert caught_up <= limit or caught_up == most
        waiting = {i: 0 if i in chosen else n for i, n in waiting.items()}
    assert not any(waiting.values())


def test_what_the_device_leaves_out_is_no_row_and_not_verified() -> None:
    records = StepRecords(False)
    records.open(step(3))
    record = records.close()
    three = [RequestOutcome("a", 3, 1), RequestOutcome("b", 3, 0)]
    three.append(RequestOutcome("grammar", 2, 2))
    choices = {"a": Choice(1, 5), "b": Choice(2, 1), "grammar": Choice(3, 0)}
    drafts = dict.fromkeys(choices, (0, 0, 0))
    # One that has ended meanwhile had rows, too.
    record.set_verified(
        three, choices | {"ended": Choice(0, 0)}, drafts | {"ended": (0,)}
    )
    outcome = record.outcome
    assert outcome.num_scheduled_tokens == 9 - 2 - 1 - 1
    assert outcome.requests == (
        # All that were verified are accepted: others would have been, but no more
        # than there are.
        RequestOutcome("a", 1, 1, num_left_out=2, num_would_be_accepted=2),
        RequestOutcome("b", 2, 0, num_left_out=1),
        RequestOutcome("grammar", 2, 2, num_forbidden=1),
    )
