"""The classic rule: shorten the draft while acceptance is low, lengthen it otherwise.

A baseline, as found in several engines: it follows acceptance alone, so it can lose
much where drafting or verifying is dear, and it never goes below one.
"""

from collections.abc import Sequence

from vllm_mtp.control.controller import DecidesEveryStep
from vllm_mtp.records import DecodeRequest, DraftDecision, StepOutcome


class ThresholdController(DecidesEveryStep):
    """Moves one draft length for all requests up and down by running acceptance."""

    def __init__(
        self,
        max_draft_length: int,
        threshold: float = 0.6,
        steps_between_moves: int = 8,
    ) -> None:
        """Start at the upper bound.

        Args:
            max_draft_length: Upper bound on K, at least 1.
            threshold: Accepted over drafted tokens that decides about the direction.
            steps_between_moves: Steps that the running mean gets to settle.
        """
        self.max_draft_length = max_draft_length
        self.threshold = threshold
        self.steps_between_moves = steps_between_moves
        self.draft_length = max_draft_length
        self._acceptance: float | None = None
        self._steps_since_move = 0

    def decide(self, requests: Sequence[DecodeRequest]) -> DraftDecision:
        lengths = {
            request.request_id: self._length_of(request.pinned_draft_length)
            for request in requests
        }
        depth = max(lengths.values(), default=self.draft_length)
        return DraftDecision(depth, lengths, "threshold")

    def _length_of(self, pin: int | None) -> int:
        if pin is None:
            return self.draft_length
        return min(max(pin, 0), self.max_draft_length)

    def may_draft(self) -> bool:
        return True

    def observe(self, outcome: StepOutcome) -> None:
        drafted = outcome.num_draft_tokens
        if drafted <= 0:
            return
        acceptance = min(max(outcome.num_accepted_tokens / drafted, 0.0), 1.0)
        if self._acceptance is None:
            self._acceptance = acceptance
        self._acceptance += 0.2 * (acceptance - self._acceptance)
        self._steps_since_move += 1
        if self._steps_since_move < self.steps_between_moves:
            return
        self._steps_since_move = 0
        direction = 1 if self._acceptance >= self.threshold else -1
        moved = self.draft_length + direction
        self.draft_length = min(max(moved, 1), self.max_draft_length)
