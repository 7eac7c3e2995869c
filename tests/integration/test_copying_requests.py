"""Which requests copy, by what workers report, and what the controller learns of it."""

import pytest

from vllm_mtp.integration.scheduler.copying import PATIENCE, Copying
from vllm_mtp.integration.scheduler.messages import Choice, CopyReport
from vllm_mtp.integration.scheduler.step_records import StepRecords
from vllm_mtp.records import DraftDecision, RequestOutcome, StepOutcome

DECISION = DraftDecision(2, {"a": 2, "b": 0}, "test", None, {"a": 7, "b": 5}, 0.9)


@pytest.mark.parametrize("is_blind", [False, True])
def test_directions_are_for_requests_whose_drafts_are_verified(is_blind: bool) -> None:
    copying = Copying(is_blind)
    assert copying.decide(DECISION, DECISION.num_draft_tokens) == 7
    directions = copying.directions
    assert directions is not None
    assert directions.draft_depth == 2
    assert directions.copy_lengths == {"a": 7}
    assert directions.acceptance == 0.9
    expected = {} if is_blind else {"a": 2, "b": 0}
    assert directions.chain_lengths == expected


def test_a_step_without_drafts_has_no_directions() -> None:
    copying = Copying(schedules_blindly=False)
    copying.decide(DECISION, DECISION.num_draft_tokens)
    assert copying.decide(DraftDecision(0, {"a": 0}), {"a": 0}) == 0
    assert copying.directions is None


def test_a_request_copies_for_some_steps_after_its_context_has_offered() -> None:
    copying = Copying(schedules_blindly=True)
    assert copying.take({"a": CopyReport(5, 0, 0)}) == []
    assert copying.take({"a": CopyReport(4, 3, 2, 5)}) == [RequestOutcome("a", 3, 2)]
    assert copying.num_verified == 5
    for _ in range(PATIENCE - 1):
        copying.take({})
        assert "a" in copying.request_ids
    copying.take({})
    assert not copying.request_ids


@pytest.mark.parametrize("is_blind", [False, True])
def test_an_offer_that_was_counted_on_and_did_not_come_is_a_failure(
    is_blind: bool,
) -> None:
    copying = Copying(is_blind)
    copying.decide(DECISION, DECISION.num_draft_tokens)
    copying.take({"a": CopyReport(5, 0, 0)})
    # Blind, rows tell that it was counted on; else that anything was drafted.
    reports = {"a": CopyReport(0, 0, 0, 5), "c": CopyReport(0, 2, 2)}
    assert copying.take(reports) == [
        RequestOutcome("c", 2, 2),
        RequestOutcome("a", 1, 0),
    ]
    copying.directions = None
    assert copying.take({}) == []


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, RequestOutcome("a", 7, 6, num_copied=5)),
        # The device left out three, which were copies.
        (Choice(4, 1), RequestOutcome("a", 4, 4, (), 3, 1, num_copied=2)),
    ],
)
def test_copies_are_the_last_of_the_draft_tokens(
    choice: Choice | None, expected: RequestOutcome
) -> None:
    records = StepRecords(drafts_after_output=False)
    records.open(StepOutcome((), 1, 8, 0.0, num_decode_requests=1))
    record = records.close()
    accepted = expected.num_accepted_tokens
    choices = {} if choice is None else {"a": choice}
    record.set_verified([RequestOutcome("a", 7, accepted)], choices, {"a": [0] * 7})
    compared = [RequestOutcome("a", 2, 1)]
    record.set_copied({"a": CopyReport(0, 2, 1, 5)}, compared)
    assert record.outcome.requests == (expected,)
    assert record.outcome.copies == tuple(compared)
