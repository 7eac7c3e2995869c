"""The rule by which the worker ends drafts: prices of a plan, chances of estimates.

A plan says whether to draft at all, how deep in the mean, and what time is worth. How
deep in each step is left to the worker where it can see how sure the MTP layers are of
each draft token. The price of a row or of a draft step is its expected time at the
plan's goodput: the tokens that the same time would bring otherwise.
"""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from vllm_mtp.control.planner import Plan
from vllm_mtp.control.step_times import Times
from vllm_mtp.control.survival import SurvivalModel
from vllm_mtp.records import DecodeRequest, DraftChances, StepOutcome, StopRule

STEP_MARGIN = 1.6
"""Factor of a draft step's price at first, 2.5 times less or more at the ends: of the
range that was best on recorded texts drafted at every position, 0.7 to 4."""
MAX_STOPPING = 64
"""Requests up to which drafts are left to the worker. In a larger batch they all need
other depths, so little is gained, and the worker decides request by request."""
MARGIN_GAIN = 0.02
"""Growth of the margin's logarithm for a draft step too many: it settles within some
dozens of steps."""


class StepMargins:
    """By which a draft step must be worth more than its price.

    Without a margin drafts are too deep: what another step promises is a sum of the
    better ones of many estimates, and a token that is won on an easy stretch of a text
    would have been won a step later, too. A rule is best where its drafts are in the
    mean about as deep as the best fixed length. So the plan says how deep in the mean,
    the rule where, and each kind of batch learns its margin.
    """

    def __init__(self) -> None:
        """Begin with the same margin for all."""
        self._margins: dict[Hashable, float] = {}

    def of(self, kind: Hashable) -> float:
        """Factor of a step's price for a kind of batch."""
        return self._margins.get(kind, STEP_MARGIN)

    def learn(self, kind: Hashable, depth: int, wanted: int) -> None:
        """A rule has drafted ``depth`` deep where ``wanted`` is wanted in the mean."""
        margin = self.of(kind) * math.exp(MARGIN_GAIN * (depth - wanted))
        self._margins[kind] = min(max(margin, STEP_MARGIN / 2.5), 2.5 * STEP_MARGIN)


class Prices(NamedTuple):
    """In committed tokens."""

    # [depth + 1]: of verifying 0, 1, .. depth draft tokens of one request
    verify: list[float]
    step: float
    """Of a draft step, and the margin that it must earn."""


def prices(
    plan: Plan, times: Times, num_requests: int, depth: int, margin: float
) -> Prices:
    """What drafting and verifying cost under a plan.

    Args:
        plan: The one in use, of depth > 0.
        times: Expected times of the batch.
        num_requests: Its size, >= 1.
        depth: Most draft steps.
        margin: Factor of a step's price.
    """
    step_s = times.seconds(0.0, 2) - times.seconds(0.0, 1)
    if num_requests == 1:
        verify_s = [times.seconds(float(k), 1) for k in range(depth + 1)]
        verify = [plan.goodput * (seconds - verify_s[0]) for seconds in verify_s]
    else:
        # Rows of many requests add up: only the slope at the usual number counts.
        low, high = max(plan.depth - 1.0, 0.5), plan.depth + 0.5
        rise_s = times.seconds(high, 1, False) - times.seconds(low, 1, False)
        row_s = max(rise_s / (high - low), 0.0) / num_requests
        verify = [plan.goodput * row_s * k for k in range(depth + 1)]
    return Prices(verify, margin * plan.goodput * max(step_s, 0.0))


class Stopping:
    """Makes the rules of the plan in use, and learns their margins."""

    def __init__(
        self, survival: SurvivalModel, copies: SurvivalModel | None = None
    ) -> None:
        """Begin without a plan.

        Args:
            survival: What is believed of acceptance.
            copies: What is believed of continuations from contexts, if there are any.
        """
        self._copies = copies
        self.uniform_depth = 1
        """How deep rules draft in the mean, by the last search."""
        self._survival = survival
        self._margins = StepMargins()
        self._kind: Hashable = None
        """Of the batch that the last rule was for; None once it was learned from."""
        self._plan: Plan | None = None
        self._prices = Prices([0.0], 0.0)
        self._chances: dict[int, DraftChances] = {}
        self._survivals: dict[int, Sequence[float]] = {}
        """By class, under that plan; of copied tokens the survivals."""

    def rule(
        self,
        plan: Plan,
        times: Times,
        requests: Sequence[DecodeRequest],
        depth: int,
        kind: Hashable,
    ) -> StopRule:
        """For a batch, by what is known now; pinned requests get no draft.

        Args:
            plan: In use.
            times: Expected times of the batch.
            requests: The batch.
            depth: Most draft steps.
            kind: Of the batch; each has a margin.
        """
        if self._plan is not plan:
            self._plan, self._chances, self._survivals = plan, {}, {}
            margin = self._margins.of(kind)
            self._prices = prices(plan, times, len(requests), depth, margin)
        self._kind = kind
        free = [r for r in requests if r.pinned_draft_length is None]
        return StopRule(
            {r.request_id: self._chances_of(r, depth) for r in free},
            self._prices.verify,
            self._prices.step,
            {} if self._copies is None else self._copied(self._copies, free),
        )

    def observe(self, outcome: StepOutcome) -> None:
        """Learn the margin from a step that a rule ended."""
        kind, self._kind = self._kind, None
        if kind is not None and outcome.draft_depth and not outcome.num_prefill_tokens:
            self._margins.learn(kind, outcome.draft_depth, self.uniform_depth)

    def _copied(
        self, copies: SurvivalModel, requests: Sequence[DecodeRequest]
    ) -> dict[str, Sequence[float]]:
        """Survival of what contexts may offer, also those that have offered nothing
        yet: where there is a rule the worker knows before anything is verified."""
        found = {}
        for request in requests:
            class_id = copies.see(request)
            if class_id not in self._survivals:
                self._survivals[class_id] = copies.survival_of_class(class_id)
            found[request.request_id] = self._survivals[class_id]
        return found

    def _chances_of(self, request: DecodeRequest, depth: int) -> DraftChances:
        class_id = self._survival.class_of.get(request.request_id)
        if class_id is None:
            class_id = self._survival.see(request)
        found = self._chances.get(class_id)
        if found is None:
            found = self._survival.chances_of_class(class_id, depth)
            self._chances[class_id] = found
        return found
