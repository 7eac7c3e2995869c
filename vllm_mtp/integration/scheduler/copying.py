"""Which requests copy: what workers report of contexts, and how far drafts may go.

A request copies for some steps after its context has offered a continuation: plans
count on another one, and one that does not come is taken for one that failed at once.
Within a text that is copied offers come as often as the MTP layers are right. Where
draft token ids never come to the scheduler (Model Runner V2) an offer is known a step
or two late, and rows for copied tokens are scheduled before it is known whether there
are any.
"""

from collections.abc import Mapping
from typing import Any

from vllm_mtp.integration.scheduler.messages import CopyDirections, CopyReport
from vllm_mtp.integration.worker.copying import may_copy
from vllm_mtp.records import DraftDecision, RequestOutcome

PATIENCE = 8
"""Steps that a request goes on to copy without an offer: MTP layers that are right once
in four times miss so often in a row once in ten."""
NOTHING = CopyReport(0, 0, 0)


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
        if not depth:
            return 0
        allowed = {i: k for i, k in decision.copy_lengths.items() if lengths.get(i)}
        # Who cannot cut drafts by their tokens needs no lengths, of which there may be
        # hundreds.
        chains = {} if self._schedules_blindly else dict(lengths)
        self.directions = CopyDirections(
            depth, chains, allowed, decision.copy_acceptance
        )
        return max(depth, *allowed.values()) if allowed else depth

    def take(self, reports: Mapping[str, CopyReport]) -> list[RequestOutcome]:
        """What became of offers, of those that could be compared.

        Args:
            reports: Of a step, by request id; others have offered nothing.
        """
        outcomes = [
            RequestOutcome(request_id, report.num_examined, report.num_matched)
            for request_id, report in reports.items()
            if report.num_examined
        ]
        self.num_verified += sum(report.num_verified for report in reports.values())
        for request_id in list(self.request_ids):
            report = reports.get(request_id, NOTHING)
            if not report.num_offered:
                if self._was_counted_on(report):
                    outcomes.append(RequestOutcome(request_id, 1, 0))
                self.request_ids[request_id] -= 1
                if not self.request_ids[request_id]:
                    del self.request_ids[request_id]
        offering = [i for i, report in reports.items() if report.num_offered]
        self.request_ids.update(dict.fromkeys(offering, PATIENCE))
        return outcomes

    def _was_counted_on(self, report: CopyReport) -> bool:
        """Whether an offer was, by a request that copies and has made none."""
        if self._schedules_blindly:
            return report.num_verified > 0
        return self.directions is not None


def copying_of_scheduler(vllm_config: Any) -> Copying | None:
    """For a scheduler of this engine; None where nothing is copied."""
    if not may_copy(vllm_config):
        return None
    return Copying(vllm_config.use_v2_model_runner)
