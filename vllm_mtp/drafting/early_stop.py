"""Stops drafting when another draft step does not pay any more.

After each draft step the confidence of the new tokens is known, so the chance that a
chain survives is known better than when the draft length was chosen. Another step is
made if the tokens that it promises, and the steps after it, are worth their price. At
the end each request keeps the part of its draft that is worth verifying.

Lossless: both are decided from proposal distributions, never from what is drawn from
them or from what the target will say.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_mtp.acceptance import MAX_CONFIDENCE
from vllm_mtp.records import DraftChances, StopRule

Array = NDArray[Any]

_NEVER = -20.0
"""Log-odds of what is never accepted."""


def _logistic(log_odds: Array) -> Array:
    result: Array = 1.0 / (1.0 + np.exp(-log_odds))
    return result


def lower_hull(prices: Sequence[float]) -> list[float]:
    """The largest convex sequence below prices, with the same ends.

    Under convex prices, and only then, it never depends on later draft tokens whether
    a token is worth verifying.
    """
    hull: list[int] = []
    for right, price in enumerate(prices):
        while len(hull) > 1:
            left, middle = hull[-2:]
            share = (middle - left) / (right - left)
            if prices[middle] < prices[left] + share * (price - prices[left]):
                break
            hull.pop()
        hull.append(right)
    result: list[float] = np.interp(
        np.arange(len(prices)), hull, [prices[i] for i in hull]
    ).tolist()
    return result


class EarlyStop:
    """One step's drafts under a rule."""

    def __init__(
        self, rule: StopRule, request_ids: Sequence[str], are_drawn: bool
    ) -> None:
        """Begin with no draft.

        Args:
            rule: Requests that it does not name get no draft.
            request_ids: Rows of the batch, in order.
            are_drawn: Draft tokens are random. Then whether a token is verified must
                not depend on it, nor on what follows from it.
        """
        self._step_price = rule.step_price
        prices = rule.verify_prices
        self._depth = depth = len(prices) - 1
        hopeless = DraftChances((_NEVER,) * depth, 0.0, (0.0,) * depth)
        chances = [rule.chances.get(i, hopeless) for i in request_ids]
        # [num_requests, depth]
        self._log_odds = np.array([each.log_odds for each in chances])
        self._unseen = np.array([each.unseen for each in chances])
        # [num_requests]
        self._slopes = np.array([each.slope for each in chances])
        # [depth + 1]
        self._prices = np.array(lower_hull(prices) if are_drawn else prices)
        self._alive = np.ones(len(request_ids))
        self._accepted = np.zeros(len(request_ids))
        # [num_requests, depth + 1]: expected accepted tokens less their price
        self._worth = np.zeros((len(request_ids), depth + 1))
        self._num_drafted = 0

    def goes_on(self, confidences: Sequence[float]) -> bool:
        """Whether another draft step pays.

        Args:
            confidences: Of the tokens drafted just now, ``[num_requests]``.
        """
        self._learn(np.array(confidences))
        drafted = self._num_drafted
        if drafted == self._depth:
            return False
        known = self._worth[:, : drafted + 1].max(axis=1, keepdims=True)
        survival = self._alive[:, None] * self._unseen[:, drafted:].cumprod(axis=1)
        accepted = self._accepted[:, None] + survival.cumsum(axis=1)
        worth = np.maximum.accumulate(accepted - self._prices[drafted + 1 :], axis=1)
        gains = np.maximum(worth, known).sum(axis=0) - known.sum()
        steps = np.arange(1, len(gains) + 1)
        return bool((gains > self._step_price * steps).any())

    def _learn(self, confidences: Array) -> None:
        # Broken weights give NaN, which nobody is sure of.
        confidences = np.minimum(np.nan_to_num(confidences), MAX_CONFIDENCE)
        log_odds = self._log_odds[:, self._num_drafted]
        self._alive *= _logistic(log_odds + self._slopes * confidences)
        self._accepted += self._alive
        self._num_drafted += 1
        price = self._prices[self._num_drafted]
        self._worth[:, self._num_drafted] = self._accepted - price

    def lengths(self) -> list[int]:
        """Draft tokens of each request that are worth verifying."""
        worth = self._worth[:, : self._num_drafted + 1]
        found: list[int] = worth.argmax(axis=1).tolist()
        return found
