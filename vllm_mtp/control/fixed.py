"""The same draft length for every request and step."""

from collections.abc import Sequence

from vllm_mtp.control.controller import DecidesEveryStep
from vllm_mtp.records import DecodeRequest, DraftDecision, StepOutcome


class FixedController(DecidesEveryStep):
    """Always drafts ``draft_length`` tokens.

    A request that is pinned gets its own K, at most that many: the depth never varies,
    so that ranks of a data-parallel engine agree without asking each other.
    """

    def __init__(self, draft_length: int) -> None:
        self.draft_length = draft_length

    def decide(self, requests: Sequence[DecodeRequest]) -> DraftDecision:
        depth = self.draft_length
        lengths = {
            request_id: depth if pin is None else min(max(pin, 0), depth)
            for request_id, _, _, pin, *_ in requests
        }
        return DraftDecision(depth, lengths, "fixed")

    def may_draft(self) -> bool:
        return self.draft_length > 0

    def observe(self, outcome: StepOutcome) -> None:
        """A fixed draft length learns nothing."""
