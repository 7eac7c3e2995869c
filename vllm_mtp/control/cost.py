"""What a step costs: learned from the engine's own steps, no shape assumed.

The batch decides the *block*: a bucket of the number of decoding requests and one of
their mean context length. Within it every kind of step is a *cell* of its own
(`cost_block`), so a pass over four rows may well cost less than one over two.

Robust: a cell is the median of its first visits, then moves by at most three typical
deviations at a time, so a step that took ten times as long moves it as far as one that
was a little slow. Drift: what known cells see at once (a busy machine) goes into one
factor and cancels in comparisons; what one cell sees stays in it.

Never visited: the shape of the nearest block that was, or the prior's, plus a plane
through the block's visited cells (ridge regression on draft tokens and depth), plus
what the nearest cells deviate from that plane.
"""

import math
from typing import NamedTuple

from vllm_mtp.control.cost_block import (
    FIRST_VISITS,
    Block,
    Cell,
    Estimate,
    Place,
    Shape,
    all_places,
    draft_tokens_of,
    mixed_tier,
    uniform_tier,
)
from vllm_mtp.records import StepOutcome

_MAX_REQUESTS = 4096
_CONTEXT_BOUNDS = (1024, 4096, 16384, 65536)


class CostPrior(NamedTuple):
    """Relative step times before any was seen, in steps without speculation.

    The defaults describe a batch bound by memory bandwidth: rows are nearly free, and
    a draft step reads one layer and the head. A start-up probe of a few steps gives
    better ones.
    """

    row_cost: float = 0.05
    """Of one more row for every request."""
    draft_cost: float = 0.08
    """Of one draft step for every request."""
    deviation: float = 0.25
    """How far the truth may lie from this, as a fraction."""
    probed: tuple[tuple[int, int, float, float], ...] = ()
    """Found at start-up: (requests, K of all, mean context tokens, seconds)."""

    def shape(self, max_draft_length: int) -> Shape:
        """Relative time of every cell."""
        seconds = {
            (tier, depth): 1.0
            + self.row_cost * draft_tokens_of(tier)
            + self.draft_cost * depth
            for tier, depth in all_places(max_draft_length)
        }
        return Shape(seconds, self.deviation)


def request_bucket(num_requests: int) -> int:
    """Smallest bucket bound >= ``num_requests``: 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    if num_requests <= 4:
        return max(num_requests, 1)
    bound = 4
    while 2 * bound < min(num_requests, _MAX_REQUESTS):
        bound *= 2
    return 3 * bound // 2 if num_requests <= 3 * bound // 2 else 2 * bound


def context_bucket(tokens_per_request: float) -> int:
    """Index of the bucket of a mean context length."""
    return sum(tokens_per_request >= bound for bound in _CONTEXT_BOUNDS)


class CostModel:
    """Learns step times, answers with expected ones for any decision."""

    def __init__(
        self,
        max_draft_length: int,
        prior: CostPrior | None = None,
        half_life_visits: float = 100.0,
        half_life_steps: float = 2000.0,
    ) -> None:
        """Start from a prior.

        Args:
            max_draft_length: Upper bound on K.
            prior: Relative times before any step.
            half_life_visits: Visits of a cell after which half of its mean is new.
            half_life_steps: Steps without a visit after which a cell weighs half.
        """
        self.max_draft_length = max_draft_length
        self.prior = prior or CostPrior()
        self.noise = 0.1
        """Typical deviation of a step's time, as a fraction."""
        self.slowdown = 1.0
        """How much slower the whole machine is than when its cells were visited."""
        self._max_weight = half_life_visits / math.log(2)
        self._forget = math.log(2) / half_life_steps
        self._places = all_places(max_draft_length)
        self._blocks: dict[tuple[int, int], Block] = {}
        self._num_steps = 0
        for num_requests, length, context, seconds in self.prior.probed:
            place = (uniform_tier(length), length)
            block = self._block(num_requests, context)
            self._learn(block, num_requests, place, float(length), seconds)

    def table(
        self, num_requests: int, context_per_request: float
    ) -> dict[Place, Estimate]:
        """Expected time of every decision for a batch.

        Args:
            num_requests: Requests that decode, >= 1.
            context_per_request: Their mean context length, tokens.
        """
        block = self._block(num_requests, context_per_request)
        scale = self.slowdown * block.factor(num_requests)
        return {
            place: Estimate(seconds * scale, deviation)
            for place, (seconds, deviation) in block.estimates(
                self._places, self.noise
            ).items()
        }

    # -- learning -----------------------------------------------------------------

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a step; one with prefill, or without a sane time, is ignored."""
        self._num_steps += 1
        seconds = outcome.step_time_s
        if outcome.num_prefill_tokens or not 0.0 < seconds < math.inf:
            return
        num_requests = outcome.num_decode_requests or outcome.num_requests
        if num_requests <= 0 or outcome.num_scheduled_tokens < num_requests:
            return
        depth = min(max(outcome.draft_depth, 0), self.max_draft_length)
        most = num_requests * self.max_draft_length
        extra = min(outcome.num_scheduled_tokens - num_requests, most)
        place = (self._tier(outcome, num_requests, extra), depth)
        block = self._block(num_requests, outcome.num_context_tokens / num_requests)
        self._learn(block, num_requests, place, extra / num_requests, seconds)

    def _tier(self, outcome: StepOutcome, num_requests: int, extra: int) -> int:
        draft_length, rest = divmod(extra, num_requests)
        if rest == 0 and all(
            request.num_draft_tokens == draft_length for request in outcome.requests
        ):
            return uniform_tier(draft_length)
        return mixed_tier(extra / num_requests)

    def _learn(
        self,
        block: Block,
        num_requests: int,
        place: Place,
        draft_tokens: float,
        seconds: float,
    ) -> None:
        seconds /= self.slowdown * block.factor(num_requests)
        cell = block.cells.get(place)
        if cell is None or len(cell.first) < FIRST_VISITS:
            self._visit_first(block, place, draft_tokens, seconds)
            return
        surprise = math.log(seconds / cell.seconds)
        bound = 3.0 * self.noise
        clipped = min(max(surprise, -bound), bound)
        # May double at most, so that a spike does not open the door to the next one,
        # while a lasting change is not clipped for long.
        self.noise += 0.02 * (1.25 * min(abs(surprise), bound) - self.noise)
        self.noise = min(max(self.noise, 0.005), 1.0)
        self._fade(cell)
        cell.weight = min(cell.weight + 1.0, self._max_weight)
        cell.seconds *= math.exp(clipped / cell.weight)
        cell.draft_tokens += (draft_tokens - cell.draft_tokens) / cell.weight
        self.slowdown *= math.exp(0.05 * clipped)
        size = num_requests / block.num_requests - 1.0
        block.slope = min(max(block.slope + 0.5 * clipped * size, 0.0), 1.0)

    def _visit_first(
        self, block: Block, place: Place, draft_tokens: float, seconds: float
    ) -> None:
        if block.cells:
            # A few visits are no median yet: bound them by what the others suggest.
            likely = block.estimates([place], self.noise)[place].seconds
            seconds = min(max(seconds, likely / 3.0), likely * 3.0)
        cell = block.cells.setdefault(place, Cell())
        cell.add_first(seconds, draft_tokens)
        cell.when = self._num_steps

    def _fade(self, cell: Cell) -> None:
        idle_steps = self._num_steps - cell.when
        cell.weight *= math.exp(-self._forget * idle_steps)
        cell.when = self._num_steps

    # -- blocks -------------------------------------------------------------------

    def _block(self, num_requests: int, context_per_request: float) -> Block:
        key = (request_bucket(num_requests), context_bucket(context_per_request))
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = Block(key[0], self._first_shape(key))
        return block

    def _first_shape(self, key: tuple[int, int]) -> Shape:
        """Relative times of the nearest block that has some of its own."""

        def distance(other: tuple[int, int]) -> float:
            return abs(math.log2(other[0] / key[0])) + abs(other[1] - key[1])

        visited = [other for other, block in self._blocks.items() if block.cells]
        if not visited:
            return self.prior.shape(self.max_draft_length)
        nearest = min(visited, key=lambda other: (distance(other), other))
        estimates = self._blocks[nearest].estimates(self._places, self.noise)
        level = estimates[0, 0].seconds
        deviation = min(0.08 + 0.06 * distance(nearest), self.prior.deviation)
        return Shape({p: e.seconds / level for p, e in estimates.items()}, deviation)
