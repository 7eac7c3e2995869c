"""The same draft length for every request and step."""

from collections.abc import Sequence

from vllm_mtp.records import DecodeRequest, DraftDecision, StepOutcome


class FixedController:
    """Always drafts ``draft_length`` tokens."""

    def __init__(self, draft_length: int) -> None:
        self.draft_length = draft_length

    def decide(self, requests: Sequence[DecodeRequest]) -> DraftDecision:
        request_ids = (request.request_id for request in requests)
        return DraftDecision(
            draft_depth=self.draft_length,
            num_draft_tokens=dict.fromkeys(request_ids, self.draft_length),
        )

    def may_draft(self) -> bool:
        return self.draft_length > 0

    def observe(self, outcome: StepOutcome) -> None:
        """A fixed draft length learns nothing."""
