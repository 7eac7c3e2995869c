"""Which requests copy: what workers report of contexts, and how far drafts may go.

A request copies for some steps after its context has offered a continuation: plans
count on another one, and one that does not come is taken for one that failed at once.
Within a text that is copied offers come as often as the MTP layers are right. So that
it is noticed where nothing is drafted contexts are searched for long matches now and
then (`worker/copying.py`). Where draft token ids never come to the scheduler (Model
Runner V2) an offer is known a step or two late, and rows for copied tokens are
scheduled before it is known whether there are any.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm_mtp.integration.scheduler.messages import (
    CopyDirections,
    CopyReport,
    CopyReports,
)
from vllm_mtp.integration.worker.copying import may_copy
from vllm_mtp.records import DraftDecision, RequestOutcome

PATIENCE = 8
"""Steps that a request goes on to copy without an offer: MTP layers that are right once
in four times miss so often in a row once in ten."""
NOTHING = CopyReport()


class OfferOutcomes(NamedTuple):
    """What became of offers."""

    behind_drafts: list[RequestOutcome]
    alone: list[RequestOutcome]


class Copying:
    """Of one scheduler."""

    def __init__(self, schedules_blindly: bool) -> None:
        """No request copies.

        Args:
            schedules_blindly: Draft token ids do not come to the scheduler.
        """
        self._schedules_blindly = schedules_blindly
        self.request_ids: dict[str, int] = {}
        """Those that copy, and for how many more steps if nothing more is offered."""
        self.num_verified = 0
        """Copied tokens so far."""
        self.directions: CopyDirections | None = None
        """For the step that was scheduled last."""

    def repeat(self) -> None:
        """A step goes without a decision: nothing is drafted, and nobody copies."""
        self.directions = None

    def decide(self, decision: DraftDecision, lengths: Mapping[str, int]) -> int:
        """Prepare directions for a step.

        Args:
            decision: About it.
            lengths: Draft lengths, by request id, of drafts that nothing continues.

        Returns:
            Tokens of its longest draft.
        """
        self.directions = None
        depth = decision.draft_depth
        if not depth and not self.request_ids:
            return 0
        behind, alone = decision.copy_lengths, decision.copied_drafts
        # Who cannot cut drafts by their tokens needs no lengths, of which there may be
        # hundreds.
        chains = {} if self._schedules_blindly else dict(lengths)
        self.directions = CopyDirections(
            depth,
            chains,
            # Not of who has nothing verified by decision.
            {i: k for i, k in behind.items() if lengths.get(i)},
            decision.copy_acceptance,
            {i: k for i, k in alone.items() if k and (lengths.get(i) or not depth)},
        )
        return max(depth, *self.directions.longest.values(), 0)

    def take(self, reports: CopyReports) -> OfferOutcomes:
        """What became of offers, of those that could be compared.

        Args:
            reports: Of a step; others have offered nothing.
        """
        found = OfferOutcomes(*(self._judged(each) for each in reports))
        for request_id in list(self.request_ids):
            behind, alone = (each.get(request_id, NOTHING) for each in reports)
            if self._is_missed(request_id, behind, alone):
                found.behind_drafts.append(RequestOutcome(request_id, 1, 0))
            self.request_ids[request_id] -= 1
            if not self.request_ids[request_id]:
                del self.request_ids[request_id]
        for each in reports:
            offering = [i for i, report in each.items() if report.num_offered]
            self.request_ids.update(dict.fromkeys(offering, PATIENCE))
        return found

    def _judged(self, reports: Mapping[str, CopyReport]) -> list[RequestOutcome]:
        self.num_verified += sum(report.num_verified for report in reports.values())
        return [
            RequestOutcome(request_id, report.num_examined, report.num_matched)
            for request_id, report in reports.items()
            if report.num_examined
        ]

    def _is_missed(
        self, request_id: str, behind: CopyReport, alone: CopyReport
    ) -> bool:
        """Whether an offer behind a draft was counted on and did not come."""
        if behind.num_offered:
            return False
        if self._schedules_blindly:
            return behind.num_verified > 0
        directions = self.directions
        if directions is None or not directions.draft_depth:
            return False
        return not (alone.num_offered and request_id in directions.copied_drafts)


def copying_of_scheduler(vllm_config: Any) -> Copying | None:
    """For a scheduler of this engine; None where nothing is copied."""
    if not may_copy(vllm_config):
        return None
    return Copying(vllm_config.use_v2_model_runner)
