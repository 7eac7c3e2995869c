"""Times of the steps of one batch, made of a few terms.

::

    time = speed * size * context * relative
    relative = 1 + entry (if drafts are verified) + row[k] + mixed (if they are unequal)
                 + draft entry (if the MTP layers run) + depth * draft step

``row[k]`` is a term of its own for every number ``k`` of draft tokens per request, so
no shape is assumed: CUDA graphs have tiers, and on a CPU a second row is dear and the
next ones nearly free.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

# Places of the terms: logarithms first, then relative times.
SPEED, SIZE, CONTEXT, ENTRY, MIXED, DRAFT_ENTRY, DRAFT, ROWS = range(8)

PRIOR_MEANS = (0.0, 0.3, 0.03, 0.03, 0.0, 0.03)
"""Of the terms up to the draft entry, before any step."""
PRIOR_DEVIATIONS = (0.1, 0.3, 0.1, 0.15, 0.15, 0.15, 0.08)
"""Of the terms up to the draft step: as wide as in the tuning worlds."""
ROW_DEVIATION = 0.12
"""Of the slope of ``row``; of a single term beside it a third of that."""
LEAST_TIME = 0.3
"""Relative time below which noise speaks."""


class CostPrior(NamedTuple):
    """Relative times before any step, in steps without speculation.

    A pass takes as long as reading the weights or as its arithmetic, with a soft knee
    (roofline).
    """

    bound_rows: float = 256.0
    """Rows whose arithmetic takes as long as reading the weights: of a GPU."""
    row_cost: float = 0.03
    """Of one more row for every request, beside that."""
    draft_cost: float = 0.08
    """Of a draft step: one layer and the head, of some dozens of layers."""


CPU_COST_PRIOR = CostPrior(bound_rows=16.0)
"""CPU cores become bound by arithmetic between 5 and 64 rows."""


@cache
def request_bucket(num_requests: int) -> int:
    """Smallest bucket bound >= ``num_requests``: 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    if num_requests <= 4:
        return max(num_requests, 1)
    bound = 1 << (num_requests - 1).bit_length()
    return 3 * bound // 4 if num_requests <= 3 * bound // 4 else bound


class Times:
    """Times of the steps of one batch, as of now: expected ones, or a sample."""

    def __init__(self, scale_s: float, terms: Sequence[float]) -> None:
        """Take what is believed.

        Args:
            scale_s: Seconds of a step without speculation.
            terms: Relative ones, from the entry on.
        """
        self._scale_s = scale_s
        self._entry, self._mixed, self._draft_entry, self._draft = terms[:4]
        self._rows = (0.0, *terms[4:])
        self._least = 1.0 + min(self._rows) + min(self._entry, 0.0)
        self._least += min(self._mixed, 0.0)

    def seconds(
        self, draft_tokens: float, depth: int, is_uniform: bool = True
    ) -> float:
        """Of one step.

        Args:
            draft_tokens: Verified, per request in the mean.
            depth: Draft steps.
            is_uniform: All requests have equally many.
        """
        rows, longest = self._rows, len(self._rows) - 1
        lower = min(int(draft_tokens), longest - 1)
        share = draft_tokens - lower
        relative = 1.0 + rows[lower] + share * (rows[lower + 1] - rows[lower])
        if draft_tokens > 0.0:
            relative += self._entry
            if not is_uniform:
                relative += self._mixed
        # The MTP layers pass over verified rows, too, where nothing is drafted.
        passes = depth or (draft_tokens > 0.0)
        if passes:
            relative += self._draft_entry + passes * self._draft
        return self._scale_s * max(relative, LEAST_TIME)

    def least_seconds(self, depth: int) -> float:
        """Of any step with so many draft steps, whatever it verifies."""
        draft = self._draft_entry + depth * self._draft if depth else 0.0
        return self._scale_s * max(self._least + draft, LEAST_TIME)


def features(
    max_draft_length: int, draft_tokens: float, depth: int, is_uniform: bool
) -> Vector:
    """Of a step's relative time; those of the logarithm are 0. See `Times.seconds`."""
    found = np.zeros(ROWS + max_draft_length)
    if draft_tokens > 0.0:
        found[ENTRY] = 1.0
        found[MIXED] = not is_uniform
        lower = min(int(draft_tokens), max_draft_length - 1)
        found[ROWS + lower] = draft_tokens - lower
        if lower:
            found[ROWS + lower - 1] = 1.0 + lower - draft_tokens
    passes = depth or (draft_tokens > 0.0)
    found[DRAFT_ENTRY] = bool(passes)
    found[DRAFT] = passes
    return found


def prior_mean(max_draft_length: int, prior: CostPrior, num_requests: int) -> Vector:
    """Terms before any step of a batch of this size."""
    k = np.arange(1.0, max_draft_length + 1)
    plain = math.hypot(1.0, num_requests / prior.bound_rows)
    rows = np.hypot(1.0, num_requests * (1.0 + k) / prior.bound_rows) / plain - 1.0
    head = np.array([*PRIOR_MEANS, prior.draft_cost])
    return np.concatenate([head, rows + prior.row_cost * k])


@cache
def prior_covariance(
    max_draft_length: int, prior: CostPrior | None, num_requests: int = 1
) -> Matrix:
    """Of the terms before any step.

    Args:
        max_draft_length: K_max.
        prior: Where arithmetic is the bound is a guess, so the slope of the rows may
            well be off by all of it; None leaves that out.
        num_requests: Size of the batch.
    """
    by_arithmetic = 0.0
    if prior is not None:
        bound = prior.bound_rows
        one, two = (math.hypot(1.0, n * num_requests / bound) for n in (1, 2))
        by_arithmetic = two / one - 1.0
    size = ROWS + max_draft_length
    covariance = np.zeros((size, size))
    covariance[range(ROWS), range(ROWS)] = np.square(PRIOR_DEVIATIONS)
    k = np.arange(1.0, max_draft_length + 1)
    rows = (ROW_DEVIATION**2 + by_arithmetic**2) * np.outer(k, k)
    rows += (ROW_DEVIATION / 3) ** 2 * np.eye(max_draft_length)
    covariance[ROWS:, ROWS:] = rows
    return covariance


def moved(mean: Vector, ratio: float) -> Vector:
    """Beliefs about batches ``ratio`` times as large: a pass is taken by its rows.

    Up to a ratio of four: farther out nothing was seen of the rows.
    """
    longest = len(mean) - ROWS
    curve = np.concatenate([[0.0], mean[ROWS:]])
    tokens = np.arange(longest + 1.0)
    slope = max(curve[-1] - curve[0], 0.0) / longest
    asked = np.clip(ratio, 0.25, 4.0) * (1.0 + tokens) - 1.0
    seen = np.interp(asked, tokens, curve)
    seen += slope * (np.maximum(asked - longest, 0.0) + np.minimum(asked, 0.0))
    growth = max(1.0 + seen[0], LEAST_TIME)
    found = mean.copy()
    found[SPEED] += math.log(growth)
    found[ENTRY:ROWS] /= growth
    found[ROWS:] = (seen[1:] - seen[0]) / growth
    return found
