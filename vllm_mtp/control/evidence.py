"""What outcomes of drafts say about log-odds: beliefs about terms, and evidence."""

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import NamedTuple

from vllm_mtp.acceptance import log_odds, logistic

PRIOR_PRECISION = 2.0
"""Of a term before any draft, per log-odds squared: about ten draft tokens."""
ALARM_DEVIATIONS = 3.5
"""Surprise that shows an abrupt change: one false alarm in some thousand steps."""

_KEEP_SURPRISE = 0.7
"""Of the running sum, by each step: a large surprise speaks at once, a run of smaller
ones of the same sign soon after."""
_MAX_SURPRISE = 2.5
"""Deviations that one draft counts for: where nearly all is accepted, one rejection is
many of them and nothing out of the ordinary."""
_MAX_STEP = 1.5
"""Log-odds that one update may move a term: the gradient is that of a line."""


class Term:
    """A Gaussian belief about one term."""

    __slots__ = ("mean", "precision")

    def __init__(self, mean: float, precision: float) -> None:
        self.mean, self.precision = mean, precision

    def fade(self, keep: float, least: float) -> None:
        """Become uncertain, down to a least precision."""
        self.precision = max(self.precision * keep, least)

    def update(self, score: float, information: float, beside: float = 0.0) -> float:
        """Learn from evidence; returns how far the mean has moved.

        Args:
            score: Gradient of the log-likelihood.
            information: Its curvature, > 0.
            beside: Variance of other terms that may explain the same.
        """
        variance = 1.0 / self.precision
        doubt = 1.0 / information + variance + beside
        step = score / information * variance / doubt
        step = min(max(step, -_MAX_STEP), _MAX_STEP)
        self.mean += step
        self.precision = 1.0 / (variance * (1.0 - variance / doubt))
        return step

    def draw(self, random: Random) -> float:
        """A plausible value, as a difference to the mean."""
        return random.gauss(0.0, 1.0) / math.sqrt(self.precision)


class RequestTerm(Term):
    """The term of one request."""

    __slots__ = ("cell", "learned_at", "request_id")

    def __init__(self, request_id: str, cell: int, now_step: int) -> None:
        super().__init__(0.0, PRIOR_PRECISION)
        self.request_id, self.cell, self.learned_at = request_id, cell, now_step

    def return_to_mean(self, keep: float) -> None:
        """Forget, down to the prior."""
        kept = keep * self.precision
        self.precision = kept + (1.0 - keep) * PRIOR_PRECISION
        self.mean *= kept / self.precision


class Evidence:
    """What the drafts of some requests with the same outcome say."""

    __slots__ = ("accepted", "chances", "one", "score", "terms")

    def __init__(
        self, terms: Sequence[RequestTerm], chances: list[float], accepted: int
    ) -> None:
        """Take what happened.

        Args:
            terms: Of the requests; one that had several such drafts is there as often.
            chances: Of acceptance, as expected, of each examined position.
            accepted: Accepted draft tokens of each.
        """
        self.terms, self.accepted = terms, accepted
        self._take(chances)

    def _take(self, chances: list[float]) -> None:
        self.chances = chances
        self.score = self.accepted - sum(chances)
        """Gradient of one draft's log-likelihood."""
        self.one = sum(p * (1.0 - p) for p in chances) + 1e-6
        """Its curvature."""

    def explain(self, moved: float) -> None:
        """What requests have in common has moved: less is left to explain."""
        self._take([logistic(log_odds(p) + moved) for p in self.chances])


class Total(NamedTuple):
    """Evidence of many drafts together."""

    score: float
    information: float


def total_of(found: Sequence[Evidence]) -> Total:
    """Evidence about what requests have in common.

    What a request's own term may explain is left out, and the more the longer it runs.
    """
    score = information = 0.0
    for evidence in found:
        weight = sum(
            PRIOR_PRECISION / (max(term.precision, PRIOR_PRECISION) + evidence.one)
            for term in evidence.terms
        )
        score += weight * evidence.score
        information += weight * evidence.one
    return Total(score, information)


class Surprise:
    """Notices an abrupt change: a running sum of standardised scores (CUSUM)."""

    def __init__(self) -> None:
        self._sum = 0.0

    def observe(
        self, by_cell: Mapping[int, Sequence[Evidence]], variances: Mapping[int, float]
    ) -> bool:
        """Whether these outcomes raise an alarm.

        Args:
            by_cell: A step's evidence.
            variances: Of what is believed of the level of each cell: what is not known
                surprises nobody.
        """
        score = variance = 0.0
        for cell, found in by_cell.items():
            information = 0.0
            for evidence in found:
                most = _MAX_SURPRISE * math.sqrt(evidence.one)
                weight = sum(
                    1.0 / (1.0 + evidence.one / term.precision)
                    for term in evidence.terms
                )
                score += weight * min(max(evidence.score, -most), most)
                information += weight * evidence.one
            variance += information + information**2 * variances[cell]
        self._sum = _KEEP_SURPRISE * self._sum + score / math.sqrt(variance)
        if abs(self._sum) * math.sqrt(1.0 - _KEEP_SURPRISE**2) <= ALARM_DEVIATIONS:
            return False
        self._sum = 0.0
        return True
