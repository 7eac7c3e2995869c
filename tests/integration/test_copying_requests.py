"""Which requests copy, by what workers report, and what the controller learns of it."""

import pytest

from vllm_mtp.integration.scheduler.copying import PATIENCE, Copying, OfferOutcomes
from vllm_mtp.integration.scheduler.messages import Choice, CopyReport, CopyReports
from vllm_mtp.integration.scheduler.step_records import StepRecords
from vllm_mtp.records import DraftDecision, RequestOutcome, StepOutcome

DECISION = DraftDecision(
    2, {"a": 2, "b": 0}, "test", None, {"a": 7, "b": 5}, 0.9, {"a": 4, "b": 4}
)


def behind(**reports: CopyReport) -> CopyReports:
    return CopyReports(behind_drafts=reports)


def alone(**reports: CopyReport) -> CopyReports:
    return CopyReports(alone=reports)


@pytest.mark.parametrize("is_blind", [False, True])
def test_directions_are_for_requests_whose_drafts_are_verified(is_blind: bool) -> None:
    copying = Copying(is_blind)
    assert copying.decide(DECISION, DECISION.num_draft_tokens) == 7
    directions = copying.directions
    assert directions is not None
    assert directions.draft_depth == 2
    assert directions.copy_lengths == {"a": 7}
    assert directions.copied_drafts == {"a": 4}
    assert directions.longest == {"a": 7}
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
    assert copying.take(behind(a=CopyReport(5))) == ([], [])
    found = copying.take(behind(a=CopyReport(4, 3, 2, 5)))
    assert found == ([RequestOutcome("a", 3, 2)], [])
    found = copying.take(alone(a=CopyReport(4, 5, 5, 2)))
    assert found == ([], [RequestOutcome("a", 5, 5)])
    assert copying.num_verified == 7
    for _ in range(PATIENCE - 1):
        copying.take(CopyReports())
        assert "a" in copying.request_ids
    copying.take(CopyReports())
    assert not copying.request_ids


def test_where_somebody_copies_contexts_are_looked_into_without_drafts_too() -> None:
    copying = Copying(schedules_blindly=False)
    copying.take(alone(a=CopyReport(5)))
    decision = DraftDecision(0, {"a": 0}, copied_drafts={"a": 6})
    assert copying.decide(decision, {"a": 0}) == 6
    assert copying.directions is not None
    assert copying.directions.draft_depth == 0
    copying.repeat()
    assert copying.directions is None


@pytest.mark.parametrize("is_blind", [False, True])
def test_an_offer_that_was_counted_on_and_did_not_come_is_a_failure(
    is_blind: bool,
) -> None:
    copying = Copying(is_blind)
    copying.decide(DECISION, DECISION.num_draft_tokens)
    copying.take(behind(a=CopyReport(5)))
    # Blind, rows tell that it was counted on; else that anything was drafted.
    reports = behind(a=CopyReport(num_verified=5), c=CopyReport(0, 2, 2))
    missed = [RequestOutcome("c", 2, 2), RequestOutcome("a", 1, 0)]
    assert copying.take(reports) == (missed, [])
    # Nothing is drafted where the context offers a draft that is taken.
    assert copying.take(alone(a=CopyReport(5))) == ([], [])
    copying.directions = None
    assert copying.take(CopyReports()) == ([], [])


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
    compared, alone = RequestOutcome("a", 2, 1), RequestOutcome("b", 3, 3)
    outcomes = OfferOutcomes([compared], [alone])
    record.set_copied(behind(a=CopyReport(0, 2, 1, 5)), outcomes)
    assert record.outcome.requests == (expected,)
    assert record.outcome.copies == (compared,)
    assert record.outcome.copied_drafts == (alone,)
