"""Acceptance math: survival, acceptance length, speedup, break-even, intervals.

Pure formulas over plain numbers; no state, no third party. Words as in the design:
*conditional acceptance* ``p_j`` is P(draft token j accepted | those before it were),
*survival* ``S_j`` is P(the first j draft tokens are all accepted) = p_1 * ... * p_j.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""

MAX_CONFIDENCE = 4.0
"""A draft token's logit is that much above its runner-up's: as good as sure."""


class Interval(NamedTuple):
    """A two-sided interval of a probability."""

    lower: float
    upper: float


def survival(conditional: Sequence[float]) -> list[float]:
    """``S_j`` for j = 1..K from the conditional acceptance of each position."""
    return list(accumulate(conditional, mul))


def conditional_acceptance(survival_probabilities: Sequence[float]) -> list[float]:
    """``p_j`` from ``S_j``; 0 after a position that nothing survives."""
    previous = [1.0, *survival_probabilities[:-1]]
    return [
        current / before if before > 0 else 0.0
        for current, before in zip(survival_probabilities, previous, strict=True)
    ]


def expected_acceptance_length(
    survival_probabilities: Sequence[float], draft_length: int | None = None
) -> float:
    """Tokens committed by one step: ``1 + sum of S_j`` over j = 1..draft_length.

    Args:
        survival_probabilities: ``S_1`` ... ``S_K_max``.
        draft_length: K; all positions by default.
    """
    return 1.0 + math.fsum(survival_probabilities[:draft_length])


def geometric_acceptance_length(probability: float, draft_length: int) -> float:
    """Closed form of the same where every position accepts with ``probability``.

    ``(1 - p^(K + 1)) / (1 - p)``: Leviathan et al., arXiv 2211.17192, equation 1.

    Raises:
        ValueError: ``probability`` is outside 0..1 or ``draft_length`` negative.
    """
    if not 0.0 <= probability <= 1.0:
        raise ValueError(f"probability: {probability}; expected 0..1")
    if draft_length < 0:
        raise ValueError(f"draft_length: {draft_length}; expected >= 0")
    if probability == 1.0:
        return draft_length + 1.0
    return float((1.0 - probability ** (draft_length + 1)) / (1.0 - probability))


def speedup(acceptance_length: float, relative_step_time: float) -> float:
    """Goodput over that of no speculation.

    Args:
        acceptance_length: Tokens committed by a step.
        relative_step_time: Time of a step that verifies and drafts, over that of one
            without speculation.

    Raises:
        ValueError: ``relative_step_time`` is not positive.
    """
    if relative_step_time <= 0:
        raise ValueError(f"relative_step_time: {relative_step_time}; expected > 0")
    return acceptance_length / relative_step_time


def break_even_probability(
    draft_length: int, relative_time: float, tolerance: float = 1e-9
) -> float | None:
    """Geometric acceptance at which drafting K tokens neither gains nor loses.

    Args:
        draft_length: K, at least 1.
        relative_time: Step time at K over that without speculation.
        tolerance: Of the result.

    Returns:
        The probability; 0.0 where drafting is free, None where even accepting every
        draft token would not pay.
    """
    if relative_time > draft_length + 1:
        return None
    lower, upper = 0.0, 1.0
    while upper - lower > tolerance:
        middle = (lower + upper) / 2
        if geometric_acceptance_length(middle, draft_length) < relative_time:
            lower = middle
        else:
            upper = middle
    return 0.0 if lower == 0.0 else upper


def wilson_interval(accepted: float, drafted: float, z: float = Z_95) -> Interval:
    """Wilson's score interval of an acceptance probability.

    Args:
        accepted: Accepted draft tokens, 0..drafted; may be a weighted count.
        drafted: Draft tokens that were tested.
        z: Quantile of the normal distribution; 95 % by default.
    """
    if drafted <= 0:
        return Interval(0.0, 1.0)
    share = min(max(accepted / drafted, 0.0), 1.0)
    scale = 1.0 + z * z / drafted
    centre = (share + z * z / (2 * drafted)) / scale
    spread = share * (1 - share) / drafted + z * z / (4 * drafted * drafted)
    half = z * math.sqrt(spread) / scale
    return Interval(max(centre - half, 0.0), min(centre + half, 1.0))


def logistic(logit: float) -> float:
    """Probability of a log-odds; safe for any finite argument."""
    if logit >= 0:
        return 1.0 / (1.0 + math.exp(-min(logit, 700.0)))
    odds = math.exp(max(logit, -700.0))
    return odds / (1.0 + odds)


def log_odds(probability: float, floor: float = 1e-6) -> float:
    """Log-odds of a probability, kept ``floor`` away from 0 and 1."""
    bounded = min(max(probability, floor), 1.0 - floor)
    return math.log(bounded / (1.0 - bounded))
