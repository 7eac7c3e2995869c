"""Which requests copy: what workers report of contexts, and how far drafts may go.

A request copies while the last thing known of its context is that it offered a
continuation: plans count on another one, and one that does not come is taken for one
that failed at once. Where draft token ids never come to the scheduler (Model Runner V2)
it is known a step or two late, and rows for copied tokens are scheduled before it is
known whether there are any.
"""

from collections.abc import Collection, Mapping
from typing import Any

from vllm_mtp.integration.scheduler.messages import CopyDirections, CopyReport
from vllm_mtp.integration.worker.copying import may_copy
from vllm_mtp.records import DraftDecision, RequestOutcome


class Copying:
    """Of one scheduler."""

    def __init__(self, schedules_blindly: bool) -> None:
        """No request copies.

        Args:
            schedules_blindly: Draft token ids do not come to the scheduler.
        """
        self._schedules_blindly = schedules_blindly
        self.request_ids: set[str] = set()
        """Those that copy."""
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
        before, self.request_ids = self.request_ids, set()
        outcomes = []
        for request_id, report in reports.items():
            self.num_verified += report.num_verified
            if report.num_offered:
                self.request_ids.add(request_id)
            elif self._has_failed(request_id, report, before):
                outcomes.append(RequestOutcome(request_id, 1, 0))
            if report.num_examined:
                outcomes.append(
                    RequestOutcome(request_id, report.num_examined, report.num_matched)
                )
        return outcomes

    def _has_failed(
        self, request_id: str, report: CopyReport, before: Collection[str]
    ) -> bool:
        """Whether an offer was counted on that did not come."""
        if self._schedules_blindly:
            return report.num_verified > 0
        return self.directions is not None and request_id in before


def copying_of_scheduler(vllm_config: Any) -> Copying | None:
    """For a scheduler of this engine; None where nothing is copied."""
    if not may_copy(vllm_config):
        return None
    return Copying(vllm_config.use_v2_model_runner)
