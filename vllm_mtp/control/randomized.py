"""A hostile controller: any draft length for any request at any step.

The output of a lossless engine does not depend on the draft length. This controller
turns that sentence into a test: whatever a clever controller may ever choose, this
one chooses sooner or later.
"""

import random
from collections.abc import Collection, Mapping, Sequence

from vllm_mtp.control.controller import DecidesEveryStep
from vllm_mtp.records import (
    DecodeRequest,
    DraftChances,
    DraftDecision,
    StepOutcome,
    StopRule,
)


class RandomController(DecidesEveryStep):
    """Draws a depth for the step and a draft length up to it for each request.

    Pins are kept, and draw nothing less: the other requests get what they would have
    got without them.
    """

    def __init__(
        self,
        max_draft_length: int,
        seed: int,
        stops_early: bool = False,
        copies: bool = False,
        copies_drafts: bool = False,
    ) -> None:
        """Begin.

        Args:
            max_draft_length: Upper bound on K.
            seed: The same one draws the same.
            stops_early: Half of the steps get a `StopRule` that makes no sense.
            copies: Drafts are continued from contexts, as far as it comes.
            copies_drafts: Or copied from them altogether.
        """
        self.max_draft_length = max_draft_length
        self._random = random.Random(seed)
        self._stops_early = stops_early
        self._copies, self._copies_drafts = copies, copies_drafts

    def decide(self, requests: Sequence[DecodeRequest]) -> DraftDecision:
        # Drawing the depth first makes whole steps without drafts likely, which
        # independent draws per request would almost never give in a large batch.
        depth = self._random.randint(0, self.max_draft_length)
        lengths = {
            request.request_id: self._random.randint(0, depth) for request in requests
        }
        for request_id, _, _, pin, *_ in requests:
            if pin is not None:
                lengths[request_id] = min(max(pin, 0), self.max_draft_length)
        depth = max([depth, *lengths.values()])
        rule = None
        if self._stops_early and depth and self._random.random() < 0.5:
            rule = self._rule(lengths, depth)
        longer = self._copied(requests, lengths) if self._copies else {}
        copied = {}
        if self._copies_drafts:
            copied = self._copied(requests, dict.fromkeys(lengths, 0))
        return DraftDecision(depth, lengths, "random", rule, longer, 0.5, copied)

    def _copied(
        self, requests: Sequence[DecodeRequest], lengths: Mapping[str, int]
    ) -> dict[str, int]:
        free = [r.request_id for r in requests if r.pinned_draft_length is None]
        longest = self.max_draft_length
        return {i: self._random.randint(lengths[i], longest) for i in free}

    def _rule(self, request_ids: Collection[str], depth: int) -> StopRule:
        def draw(lowest: float, highest: float, count: int) -> list[float]:
            return [self._random.uniform(lowest, highest) for _ in range(count)]

        chances = {
            request_id: DraftChances(
                draw(-3.0, 3.0, depth), self._random.uniform(0, 2), draw(0, 1, depth)
            )
            for request_id in request_ids
        }
        step_price = self._random.uniform(-0.1, 0.6) * len(request_ids)
        prices = [0.0, *draw(-0.2, 1.5, depth)]
        longest = self.max_draft_length if self._copies else 0
        copies = {request_id: draw(0, 1, longest) for request_id in request_ids}
        return StopRule(chances, prices, step_price, copies)

    def may_draft(self) -> bool:
        return True

    def observe(self, outcome: StepOutcome) -> None:
        """Randomness learns nothing."""
