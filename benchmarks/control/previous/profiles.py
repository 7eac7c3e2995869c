"""Acceptance by position of requests like the mean, for each kind of request.

A *cell* is a bucket of context length and a *regime*: greedy or sampled, free or
constrained. Its profile holds the log-odds of each position.
"""

from collections.abc import Sequence

from vllm_mtp.acceptance import log_odds
from vllm_mtp.records import DecodeRequest

CONTEXT_BOUNDS = (512, 2048, 8192, 32768, 131072)
"""Upper bounds, in tokens, of the buckets of context length; the last is open."""
NUM_CONTEXT_BUCKETS = len(CONTEXT_BOUNDS) + 1
_SAMPLED, _CONSTRAINED = 1, 2
"""Bits of a regime."""
_MAX_LOG_ODDS = 8.0
_WORTH_OF_NEIGHBOUR, _WORTH_OF_STRANGER = 16.0, 4.0
"""Most precision of what a new cell starts from: neighbours are alike, not the same;
constrained requests and free ones are neither."""


def context_bucket(num_context_tokens: int) -> int:
    """Index of the bucket of a context length."""
    for index, bound in enumerate(CONTEXT_BOUNDS):
        if num_context_tokens < bound:
            return index
    return len(CONTEXT_BOUNDS)


def cell_of(request: DecodeRequest) -> int:
    """Cell of a request: regime and bucket of context length as one index."""
    regime = 0 if request.is_greedy else _SAMPLED
    if request.is_constrained:
        regime |= _CONSTRAINED
    return regime * NUM_CONTEXT_BUCKETS + context_bucket(request.num_context_tokens)


def regime_of(cell: int) -> int:
    """Regime of a cell."""
    return cell // NUM_CONTEXT_BUCKETS


def sibling_of(regime: int) -> int:
    """The regime that differs only in whether requests are constrained."""
    return regime ^ _CONSTRAINED


def is_sampled(regime: int) -> bool:
    """Whether a regime's requests are sampled."""
    return bool(regime & _SAMPLED)


def _distance(cell: int, other: int) -> tuple[int, int, int]:
    """How little a cell has in common with another: what is constrained, then what is
    sampled, then the context length."""
    differing = regime_of(cell) ^ regime_of(other)
    buckets = cell % NUM_CONTEXT_BUCKETS - other % NUM_CONTEXT_BUCKETS
    return differing, abs(buckets), other


class Profile:
    """Log-odds of each position in one cell, and how well they are known."""

    __slots__ = ("logits", "precisions")

    def __init__(self, logits: list[float], precisions: list[float]) -> None:
        self.logits = logits
        self.precisions = precisions

    def learn(
        self,
        probabilities: Sequence[float],
        num_accepted: int,
        moved: float,
        count: int,
        max_precision: float,
    ) -> None:
        """Learn from some drafts that went alike.

        Args:
            probabilities: Of acceptance, as expected, of each examined position.
            num_accepted: Accepted draft tokens of each.
            moved: What all requests have in common explains so many log-odds of it.
            count: How many drafts.
            max_precision: Where learning stops to slow down.
        """
        for position, p in enumerate(probabilities):
            information = p * (1.0 - p)
            residual = (position < num_accepted) - p - information * moved
            known = self.precisions[position] + count * information
            self.precisions[position] = min(known, max_precision)
            step = min(max(count * residual / known, -1.0), 1.0)
            logit = self.logits[position] + step
            self.logits[position] = min(max(logit, -_MAX_LOG_ODDS), _MAX_LOG_ODDS)


class Profiles:
    """All cells seen so far."""

    def __init__(
        self, max_draft_length: int, prior: Sequence[float], prior_precision: float
    ) -> None:
        """Begin with none.

        Args:
            max_draft_length: Positions of a profile.
            prior: Conditional acceptance by position; the last one repeats.
            prior_precision: Of its log-odds.
        """
        self._max_draft_length = max_draft_length
        self._prior = prior
        self._prior_precision = prior_precision
        self._of_cell: dict[int, Profile] = {}

    def of(self, cell: int) -> Profile:
        """A cell's profile; a new one starts from the nearest cell known so far."""
        profile = self._of_cell.get(cell)
        if profile is None:
            profile = self._of_cell[cell] = self._new(cell)
        return profile

    def _new(self, cell: int) -> Profile:
        if self._of_cell:
            nearest = min(self._of_cell, key=lambda other: _distance(cell, other))
            known, worth = self._of_cell[nearest], _WORTH_OF_NEIGHBOUR
            if (regime_of(nearest) ^ regime_of(cell)) & _CONSTRAINED:
                worth = _WORTH_OF_STRANGER
            precisions = [min(k, worth) for k in known.precisions]
            return Profile(list(known.logits), precisions)
        last, positions = len(self._prior) - 1, range(self._max_draft_length)
        return Profile(
            [log_odds(self._prior[min(j, last)]) for j in positions],
            [self._prior_precision for _ in positions],
        )
