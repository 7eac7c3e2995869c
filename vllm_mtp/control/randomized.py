"""A hostile controller: any draft length for any request at any step.

The output of a lossless engine does not depend on the draft length. This controller
turns that sentence into a test: whatever a clever controller may ever choose, this
one chooses sooner or later.
"""

import random
from collections.abc import Sequence

from vllm_mtp.records import DecodeRequest, DraftDecision, StepOutcome


class RandomController:
    """Draws a depth for the step and a draft length up to it for each request.

    Pins are kept, and draw nothing less: the other requests get what they would have
    got without them.
    """

    def __init__(self, max_draft_length: int, seed: int) -> None:
        self.max_draft_length = max_draft_length
        self._random = random.Random(seed)

    def decide(self, requests: Sequence[DecodeRequest]) -> DraftDecision:
        # Drawing the depth first makes whole steps without drafts likely, which
        # independent draws per request would almost never give in a large batch.
        depth = self._random.randint(0, self.max_draft_length)
        lengths = {
            request.request_id: self._random.randint(0, depth) for request in requests
        }
        for request_id, _, _, pin, _ in requests:
            if pin is not None:
                lengths[request_id] = min(max(pin, 0), self.max_draft_length)
        depth = max([depth, *lengths.values()])
        return DraftDecision(depth, lengths, "random")

    def may_draft(self) -> bool:
        return True

    def observe(self, outcome: StepOutcome) -> None:
        """Randomness learns nothing."""
