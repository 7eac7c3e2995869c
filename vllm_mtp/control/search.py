"""Finds the best plan of each depth for a batch, expected or in a sample."""

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from vllm_mtp.control.continuing import continued_plan
from vllm_mtp.control.cost import CostModel
from vllm_mtp.control.exploration import sampled_goodput
from vllm_mtp.control.grouping import BatchKind, grouped
from vllm_mtp.control.options import GoodputOptions
from vllm_mtp.control.planner import Group, Plan, feasible, goodput, improved, plans
from vllm_mtp.control.selective import selective_plan
from vllm_mtp.control.step_times import Times
from vllm_mtp.control.stopping import prices
from vllm_mtp.control.survival import SurvivalModel
from vllm_mtp.records import DecodeRequest


class Found(NamedTuple):
    """What a search has found for a batch."""

    plans: list[Plan]
    """The best one of each depth that keeps the latency bound, depths rising."""
    shallowest_draft: Plan | None
    """That of the least depth above 0, bound or not."""
    times: Times
    uniform_depth: int
    """Best depth above 0 if every request verified all of it; 0 if there is none."""
    groups: list[Group]
    classes: list[int]
    """Of each group."""

    @property
    def has_choice(self) -> bool:
        """Another plan than the one in use could be run."""
        is_free = any(group.pinned is None for group in self.groups)
        return is_free and len(self.plans) > 1

    def at(self, depth: int) -> Plan | None:
        """The plan of a depth."""
        return next((plan for plan in self.plans if plan.depth == depth), None)


class Search:
    """Asks both models about batches."""

    def __init__(
        self,
        survival: SurvivalModel,
        cost: CostModel,
        options: GoodputOptions,
        depths: Sequence[int],
        bounded: Callable[[int], int],
    ) -> None:
        """Take what never changes.

        Args:
            survival: What is believed of acceptance.
            cost: What is believed of step times.
            options: What the engine can do.
            depths: Allowed draft depths, rising.
            bounded: The draft length that a pinned one becomes.
        """
        self._survival, self._cost, self._options = survival, cost, options
        self._depths, self._bounded = depths, bounded

    def find(
        self, requests: Sequence[DecodeRequest], kind: BatchKind, may_stop: bool
    ) -> Found:
        """The best plan of each depth by what is expected.

        Args:
            requests: The batch, at least one request.
            kind: Of the batch.
            may_stop: The worker may end its drafts by a rule.
        """
        options = self._options
        times = self._times(requests, kind)
        groups, classes = grouped(requests, self._survival, self._bounded, may_stop)
        found = plans(groups, times, self._depths, options.may_mix(len(requests)))
        shallowest = next((plan for plan in found if plan.depth), None)
        found = feasible(found, options.max_token_latency_s)
        drafting = [plan for plan in found if plan.depth]
        uniform_depth = max(drafting, key=goodput).depth if drafting else 0
        # A rule keeps no promise to a single request.
        if options.max_token_latency_s is None and not any(
            group.pinned is not None for group in groups
        ):
            found = improved(
                found, groups, times, lambda plan: _by_rule(plan, groups, times)
            )
        if kind.is_copying and options.may_mix(len(requests)):
            found = [continued_plan(plan, groups, times) for plan in found]
        return Found(found, shallowest, times, uniform_depth, groups, classes)

    def best_in_sample(
        self,
        found: Found,
        requests: Sequence[DecodeRequest],
        kind: BatchKind,
        random: Random,
    ) -> Plan:
        """The plan that is best in one sample of both posteriors.

        Args:
            found: What was found for the batch.
            requests: The batch.
            kind: Of the batch.
            random: The only source of randomness.
        """
        draw = self._survival.draw(random, [r.request_id for r in requests])
        sampled = [self._survival.survival_of_class(c, draw) for c in found.classes]
        times = self._times(requests, kind, random)

        def worth(plan: Plan) -> float:
            return sampled_goodput(plan, found.groups, sampled, times)

        return max(found.plans, key=worth)

    def _times(
        self,
        requests: Sequence[DecodeRequest],
        kind: BatchKind,
        random: Random | None = None,
    ) -> Times:
        size = len(requests)
        context = sum(request.num_context_tokens for request in requests) / size
        return self._cost.times(size, context, kind.is_greedy, random)


def _by_rule(plan: Plan, groups: Sequence[Group], times: Times) -> Plan:
    """The same depth with a stop rule, where the worker can see its drafts."""
    if not plan.depth or not any(group.offsets for group in groups):
        return plan
    num_requests = sum(group.num_requests for group in groups)
    known = prices(plan, times, num_requests, plan.depth, 1.0)
    return selective_plan(groups, plan, known.verify, times)
