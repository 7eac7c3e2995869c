"""Stops drafting when another draft step does not pay any more.

After each draft step the confidence of the new tokens is known, so the chance that a
chain survives is known better than when the draft length was chosen. Another step is
made if the tokens that it promises, and the steps after it, are worth their price. At
the end each request keeps the part of its draft that is worth verifying.

Plain Python on purpose: it runs between two draft steps, when nothing is in the caches,
and for a few requests a dozen calls of NumPy took a tenth of a draft step.

Lossless: both are decided from proposal distributions, never from what is drawn from
them or from what the target will say. A draft that the request's context continues
needs no further draft step: that depends on the tokens drawn, and comes after all of
those whose verification is settled.
"""

from collections.abc import Collection, Sequence
from itertools import pairwise

from vllm_mtp.acceptance import MAX_CONFIDENCE, logistic
from vllm_mtp.records import DraftChances, StopRule

_NEVER = -20.0
"""Log-odds of what is never accepted."""


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
    result = [prices[0]]
    for left, right in pairwise(hull):
        slope = (prices[right] - prices[left]) / (right - left)
        result += (prices[right] - slope * i for i in range(right - left - 1, -1, -1))
    return result


class _Chain:
    """The draft of one request."""

    __slots__ = ("accepted", "alive", "best", "chances", "length")

    def __init__(self, chances: DraftChances) -> None:
        self.chances = chances
        self.alive = 1.0
        """Probability that all tokens so far are accepted."""
        self.accepted = 0.0
        """Tokens that are expected to be."""
        self.best = 0.0
        """Most that a part of the draft is worth: accepted tokens less their price."""
        self.length = 0
        """Of that part."""

    def extend(self, position: int, confidence: float, price: float) -> None:
        log_odds, slope, _ = self.chances
        # Broken weights give NaN, which nobody is sure of.
        sure = min(confidence, MAX_CONFIDENCE) if confidence == confidence else 0.0
        self.alive *= logistic(log_odds[position] + slope * sure)
        self.accepted += self.alive
        worth = self.accepted - price
        if worth > self.best:
            self.best, self.length = worth, position + 1


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
        self._step_price, self._are_drawn = rule.step_price, are_drawn
        # [depth + 1]
        prices = rule.verify_prices
        self._prices = lower_hull(prices) if are_drawn else prices
        self._depth = depth = len(prices) - 1
        hopeless = DraftChances((_NEVER,) * depth, 0.0, (0.0,) * depth)
        self._chains = [_Chain(rule.chances.get(i, hopeless)) for i in request_ids]
        self._copies = [rule.copies.get(i, ()) for i in request_ids]
        self._continued: frozenset[int] = frozenset()
        self.num_drafted = 0
        """Draft steps made."""

    def extend(self, confidences: Sequence[float]) -> None:
        """A draft step has been made.

        Args:
            confidences: Of the tokens drafted just now, ``[num_requests]``.
        """
        position = self.num_drafted
        self.num_drafted = drafted = position + 1
        price = self._prices[drafted]
        for chain, confidence in zip(self._chains, confidences, strict=True):
            chain.extend(position, confidence, price)

    def continue_from_contexts(self, places: Collection[int]) -> None:
        """The contexts of these requests continue their drafts so far."""
        self._continued = frozenset(places)

    def goes_on(self) -> bool:
        """Whether another draft step pays."""
        gains = self._gains(self.num_drafted)
        return any(
            gain > self._step_price * (number + 1) for number, gain in enumerate(gains)
        )

    def _gains(self, drafted: int) -> list[float]:
        """What 1, 2, .. more draft steps promise all requests together."""
        gains = [0.0] * (self._depth - drafted)
        prices = self._prices[drafted + 1 :]
        for place, chain in enumerate(self._chains):
            if place in self._continued:
                continue
            alive, accepted = chain.alive, chain.accepted
            known = best = chain.best
            unseen = chain.chances.unseen[drafted:]
            for number, (chance, price) in enumerate(zip(unseen, prices, strict=True)):
                alive *= chance
                accepted += alive
                best = max(best, accepted - price)
                gains[number] += best - known
        return gains

    def lengths(self) -> list[int]:
        """Draft tokens of each request that are worth verifying."""
        return [chain.length for chain in self._chains]

    def may_continue(self) -> list[int]:
        """Places of requests whose drafts contexts may continue."""
        return [place for place, copies in enumerate(self._copies) if copies]

    def continued_lengths(self) -> list[int]:
        """Draft tokens of each request that its context must agree with.

        Those worth verifying. Where there are none it is the first that counts, if the
        context may speak for it: it may not for one that was drawn.
        """
        least = 0 if self._are_drawn else min(self.num_drafted, 1)
        return [max(chain.length, least) for chain in self._chains]

    def copy_lengths(self) -> list[int]:
        """Draft tokens worth verifying where the context agrees with so many."""
        lengths = self.continued_lengths()
        known = zip(self._chains, lengths, self._copies, strict=True)
        return [self._copy_length(*each) for each in known]

    def _copy_length(self, chain: _Chain, length: int, copies: Sequence[float]) -> int:
        """Of a request: that which is worth most."""
        longest = chain.length
        if not length or not copies:
            return longest
        prices, accepted, best = self._prices, 0.0, 0.0
        if not longest:  # the draft's first token comes along
            accepted = copies[0]
        free = prices[longest]
        for place, chance in enumerate(copies[1:], length + 1):
            if place >= len(prices):
                break
            accepted += chance
            if accepted - (prices[place] - free) > best:
                best, longest = accepted - (prices[place] - free), place
        return longest
