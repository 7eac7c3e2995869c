"""The rule by which the worker ends drafts: prices of a plan, chances of estimates.

A plan says whether to draft at all, how deep in the mean, and what time is worth. How
deep in each step is then left to the worker, which sees how sure the MTP layers are of
each draft token. The price of a row or of a draft step is its expected time at the
plan's goodput: the tokens that the same time would bring otherwise.
"""

import math
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from benchmarks.control.previous.expected_times import ExpectedTimes
from benchmarks.control.previous.planner import Plan
from benchmarks.control.previous.survival import SurvivalModel
from vllm_mtp.records import DraftChances, StopRule

_FIRST_MARGIN = 1.6
_LEAST_MARGIN, _LARGEST_MARGIN = 0.7, 4.0
_MARGIN_GAIN = 0.02
"""Growth of the margin's logarithm for a draft step too many: it settles within some
dozens of steps."""


class StepMargins:
    """By which a draft step must be worth more than its price.

    Without a margin drafts are too deep: what another step promises is a sum of the
    better ones of many estimates, and a token that is won on an easy stretch of a text
    would have been won a step later, too. With a wrong one, or wrong prices, a rule
    loses to a fixed draft length. Replayed over texts that were drafted at every
    position, it is best where its drafts are in the mean about as deep as the best
    fixed length, for 1 and for 4 requests and for dear and cheap draft steps: 1 to 6 %
    faster. So the plan says how deep in the mean, the rule where, and the margin of
    each size of batch is found out.
    """

    def __init__(self) -> None:
        self._margins: dict[Hashable, float] = {}

    def of(self, size: Hashable) -> float:
        """Factor of a step's price.

        Args:
            size: Of the batch.
        """
        return self._margins.get(size, _FIRST_MARGIN)

    def learn(self, size: Hashable, depth: int, wanted: int) -> None:
        """A rule has drafted so deep.

        Args:
            size: Of the batch.
            depth: Draft steps.
            wanted: In the mean.
        """
        margin = self.of(size) * math.exp(_MARGIN_GAIN * (depth - wanted))
        self._margins[size] = min(max(margin, _LEAST_MARGIN), _LARGEST_MARGIN)


class Prices(NamedTuple):
    """In committed tokens."""

    # [depth + 1]: of verifying 0, 1, .. depth draft tokens of one request
    verify: list[float]
    step: float
    """Of a draft step, and the margin that it must earn."""


def prices(
    plan: Plan, times: ExpectedTimes, num_requests: int, depth: int, margin: float
) -> Prices:
    """What drafting and verifying cost under a plan.

    Args:
        plan: The one in use, of depth > 0.
        times: Expected times of the batch.
        num_requests: Its size, >= 1.
        depth: Most draft steps.
        margin: Factor of a step's price.
    """
    step_s = times.uniform(0, 2).seconds - times.uniform(0, 1).seconds
    lengths = range(depth + 1)
    if num_requests == 1:
        verify_s = [times.uniform(length, 1).seconds for length in lengths]
        verify = [plan.goodput * (seconds - verify_s[0]) for seconds in verify_s]
    else:
        # Rows of many requests add up: only the slope at the usual number counts.
        row_s = _slope(times.mixed_curve(1), 2 * plan.depth) / num_requests
        verify = [plan.goodput * max(row_s, 0.0) * length for length in lengths]
    return Prices(verify, margin * plan.goodput * max(step_s, 0.0))


def _slope(curve: list[float], around: int) -> float:
    """Seconds per draft token of every request; the curve goes by halves."""
    last = len(curve) - 1
    left, right = max(min(around, last) - 2, 0), min(around + 1, last)
    return 2.0 * (curve[right] - curve[left]) / (right - left)


class Stopping:
    """Makes the rules of one plan."""

    def __init__(self, survival: SurvivalModel, plan: Plan, known: Prices) -> None:
        self.plan = plan
        self._survival = survival
        self._prices = known
        self._depth = len(known.verify) - 1
        self._chances: dict[int, DraftChances] = {}
        """By class."""

    def rule(self, request_ids: Iterable[str], class_ids: Iterable[int]) -> StopRule:
        """For a batch, by what is known now."""
        pairs = zip(request_ids, class_ids, strict=True)
        return StopRule(
            {request_id: self._chances_of(class_id) for request_id, class_id in pairs},
            self._prices.verify,
            self._prices.step,
        )

    def _chances_of(self, class_id: int) -> DraftChances:
        found = self._chances.get(class_id)
        if found is None:
            found = self._survival.chances_of_class(class_id, self._depth)
            self._chances[class_id] = found
        return found
