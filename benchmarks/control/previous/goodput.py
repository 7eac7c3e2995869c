"""Chooses the draft length that promises the most committed tokens per second.

``observe`` learns (`survival`, `cost`) and every few steps looks for the best plan for
the batch it saw last (`planner`); ``decide`` only maps requests to classes and classes
to draft lengths, since it stands between two steps. A plan is a rule (depth and a cut
through survival), so requests that come and go in between are served by it, too.

The cost of drafting, paid in the step that drafts, and that of verifying, paid in the
next, belong to one decision: both are in the time that a plan is divided by.

Stable: another depth must promise ``margin`` more, and drafting after a pause must
earn back what catching up costs (`preference`). Curious: plans that would be the best
if luck is with them are tried for a step or two, within a budget (`probing`). Where the
worker can look at its drafts, a plan of depth > 0 only says that drafting pays and what
time is worth; how deep is left to a rule (`stopping`).

Deterministic: the same calls give the same decisions, on every rank.
"""

import math
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import NamedTuple

from benchmarks.control.previous.backlog import Backlog
from benchmarks.control.previous.batch_kind import request_bucket
from benchmarks.control.previous.cost import CostModel
from benchmarks.control.previous.draft_lengths import DraftLengths, items
from benchmarks.control.previous.expected_times import ExpectedTimes
from benchmarks.control.previous.exploration import ExplorationOptions
from benchmarks.control.previous.grouping import grouped
from benchmarks.control.previous.planner import Batch, Plan, plans
from benchmarks.control.previous.preference import (
    BatchTraits,
    Habit,
    best_of_each_depth,
    feasible,
    preferred,
    usual_depth,
)
from benchmarks.control.previous.probing import Probing, Situation
from benchmarks.control.previous.selective import MAX_SPLIT, selective_plans
from benchmarks.control.previous.step_parts import step_parts
from benchmarks.control.previous.step_times import CostPrior
from benchmarks.control.previous.stopping import StepMargins, Stopping, prices
from benchmarks.control.previous.survival import SurvivalModel, SurvivalOptions
from vllm_mtp.records import (
    DecodeRequest,
    DraftDecision,
    RequestOutcome,
    StepEstimate,
    StepOutcome,
)

_MAX_STOPPING = 64
"""Requests up to which drafts are left to the worker. In a larger batch they all need
other depths, so little is gained, and the rule is worked out request by request."""

_SEARCH_ALONE_S = 0.4e-3
_SEARCH_S = 1.2e-3
"""What looking for a plan takes on a slow core, for one request and for several."""
_SEARCH_SHARE = 0.005
"""Of the time that it may take where steps are long."""


class GoodputOptions(NamedTuple):
    """How a `GoodputController` behaves; the defaults suit serving."""

    margin: float = 0.03
    """Gain in goodput that another depth must promise. The best of many estimates is
    mostly the luckiest: on recorded texts smaller promises were not kept."""
    min_replan_steps: int = 8
    """Steps between two searches for the best plan, after news. Fewer where steps are
    so long that it does not matter: a plan follows what requests have just accepted."""
    max_replan_steps: int = 32
    """The same when the last searches changed nothing."""
    max_token_latency_s: float | None = None
    """Latency mode: no request may be expected to wait longer for a token."""
    depths: tuple[int, ...] | None = None
    """Allowed depths, rising: those with CUDA graphs, or the one that data-parallel
    ranks agree on. None for all up to the bound."""
    max_graph_rows: int = 0
    """Rows of the longest step that is one CUDA graph if all of its requests have
    equally many draft tokens. Where a batch can have such steps it has no others: out
    of the graph every layer waits for the host, and where steps overlap the time that
    takes shows in the step before, so it would not be learned whose it is."""
    compares_drafts: bool = False
    """Outcomes tell how drafts would have done of which nothing was verified."""
    draws_drafts: bool = False
    """Drafts of sampled requests are drawn; see `Probing`."""
    stops_early: bool = False
    """The worker can follow a `StopRule`."""
    survival: SurvivalOptions = SurvivalOptions()
    exploration: ExplorationOptions = ExplorationOptions()
    cost_prior: CostPrior = CostPrior()


_OFF = Plan(0, 0.0, 1.0, 1.0, 1.0)
_goodput = attrgetter("goodput")


class GoodputController:
    """Maximises expected goodput, online."""

    def __init__(
        self, max_draft_length: int, options: GoodputOptions | None = None
    ) -> None:
        self.max_draft_length = max_draft_length
        self.options = options or GoodputOptions()
        self.survival = SurvivalModel(max_draft_length, self.options.survival)
        self.cost = CostModel(max_draft_length, self.options.cost_prior)
        self.probing = Probing(
            self.options.exploration,
            self.options.margin,
            self.options.compares_drafts,
            self.options.draws_drafts,
        )
        self.budget = self.probing.budget
        self.plan: Plan | None = None
        """The best one known; probes aside, what is decided."""
        self.num_switches = 0
        """How often the plan's depth has changed for batches of the same kind."""
        self._depths = self.options.depths or tuple(range(max_draft_length + 1))
        self._can_be_off = 0 in self._depths
        self._lengths = DraftLengths(_OFF, self.survival)
        self._times: ExpectedTimes | None = None
        self._stopping: Stopping | None = None
        """Under the plan, or a trial's; None until asked for."""
        self._margins = StepMargins()
        self._uniform_depth = 1
        """How deep rules draft in the mean."""
        self._is_ruled = False
        """The last decision left depth to a rule."""
        self._trying = self._lengths
        """Of the probe that is under way."""
        self._seen: Sequence[DecodeRequest] = ()
        """The batch of the last decision."""
        self._backlog = Backlog()
        self._may_draft = True
        """Slots for drafts are reserved in this step."""
        self._planned_for: BatchTraits | None = None
        self._habits: dict[BatchTraits, Habit] = {}
        """By the kinds of batches that were planned for."""
        self._replan_steps = self.options.min_replan_steps
        self._steps_since_plan = 0

    # -- deciding -----------------------------------------------------------------

    def may_draft(self) -> bool:
        """Whether the next decision may be to draft; it is kept to that."""
        self._may_draft = (
            self.plan is None
            or not self._can_be_off
            or self.plan.depth > 0
            or self.probing.may_draft_while_off(self._situation())
        )
        return self._may_draft

    def decide(self, requests: Sequence[DecodeRequest]) -> DraftDecision:
        """Draft depth and draft lengths by the current plan, or by a probe."""
        if not requests:
            # Ranks that may not differ draft as deep as the others even so.
            return DraftDecision(0 if self._can_be_off else self._depths[0], {}, "idle")
        ids, _, are_greedy, pins, _, are_constrained = zip(*requests, strict=True)
        self._seen, self._is_ruled = requests, False
        traits = BatchTraits.of(are_greedy, are_constrained)
        if self.plan is None or traits != self._planned_for:
            self.probing.stop()
            self._replan(traits)
        if not self._may_draft and not any(pins):
            self._earn()
            return DraftDecision(0, dict.fromkeys(ids, 0), "off")
        lengths, reason, drafted_for = self._choose()
        depth = lengths.plan.depth
        goes_on = reason == "exploit" or (self._is_off and drafted_for is None)
        if depth and goes_on and self._may_stop(len(ids)) and not any(pins):
            return self._until_it_does_not_pay(requests, lengths.plan, reason)
        if lengths.plan.is_uniform:
            chosen = dict.fromkeys(ids, depth)
        else:
            classes = self._classes(requests, ids)
            chosen = dict(zip(ids, items(lengths, classes), strict=True))
        if drafted_for is not None:
            chosen = {i: k if i in drafted_for else 0 for i, k in chosen.items()}
        if pins.count(None) != len(pins):
            depth = self._apply_pins(chosen, requests, depth)
        return DraftDecision(depth, chosen, reason)

    def rest_steps(self) -> int:
        """How long drafting is off for certain."""
        if self.plan is None or self.plan.depth > 0 or not self._can_be_off:
            return 0
        return self.probing.rest_steps()

    def rested(self, outcomes: Sequence[StepOutcome]) -> None:
        """Learn from steps that were off without asking."""
        self.probing.rested(len(outcomes))
        for outcome in outcomes:
            self._earn()
            self.observe(outcome)

    def _may_stop(self, num_requests: int) -> bool:
        """Whether the worker may end drafts of a batch."""
        return self.options.stops_early and num_requests <= _MAX_STOPPING

    def _until_it_does_not_pay(
        self, requests: Sequence[DecodeRequest], plan: Plan, reason: str
    ) -> DraftDecision:
        """Leave the draft lengths to the worker, which sees the drafts."""
        assert self._times is not None
        is_bounded = self.options.max_token_latency_s is not None
        depth = plan.depth if is_bounded else self._depths[-1]
        if self._stopping is None or self._stopping.plan is not plan:
            margin = self._margins.of(self._planned_for)
            known = prices(plan, self._times, len(requests), depth, margin)
            self._stopping = Stopping(self.survival, plan, known)
        chosen = {request.request_id: depth for request in requests}
        free = [request for request in requests if request.pinned_draft_length is None]
        if len(free) < len(requests):
            chosen = dict.fromkeys(chosen, 0)
            chosen.update((request.request_id, depth) for request in free)
        ids = [request.request_id for request in free]
        rule = self._stopping.rule(ids, self._classes(free, ids)) if free else None
        self._is_ruled = rule is not None and not is_bounded
        return DraftDecision(depth if free else 0, chosen, reason, rule)

    def _classes(
        self, requests: Sequence[DecodeRequest], ids: Sequence[str]
    ) -> Sequence[int]:
        """Class of each request, those included that came since the last plan."""
        survival = self.survival
        try:
            return items(survival.class_of, ids)
        except KeyError:
            for request in requests:
                if request.request_id not in survival.class_of:
                    survival.see(request)
            return items(survival.class_of, ids)

    def _bounded(self, pin: int) -> int:
        longest = self.max_draft_length if self._can_be_off else self._depths[-1]
        return min(max(pin, 0), longest)

    def _apply_pins(
        self, chosen: dict[str, int], requests: Sequence[DecodeRequest], depth: int
    ) -> int:
        """Returns the depth that pinned requests need as well."""
        free = False
        for request in requests:
            pin = request.pinned_draft_length
            if pin is None:
                free = True
            else:
                chosen[request.request_id] = self._bounded(pin)
        deepest = max(chosen.values())
        return max(depth, deepest) if free or not self._can_be_off else deepest

    def _choose(self) -> tuple[DraftLengths, str, Collection[str] | None]:
        """Plan of this step, why, and the requests to draft for; None for all."""
        self._earn()
        if not self._may_draft:
            return DraftLengths(_OFF, self.survival), "off", None
        now = self._situation()
        probe = self.probing.step(now)
        if probe is None:
            return self._lengths, "off" if now.is_off else "exploit", None
        # One step after a probe its outcome is here; a trial may be cut short.
        self._replan_steps = 2 if self.probing.is_over else 4
        if self._trying.plan is not probe.plan:
            self._trying = DraftLengths(probe.plan, self.survival)
        if not now.is_off or probe.num_steps > 1:
            return self._trying, "probe", None
        chosen = () if probe.compares else self.probing.sample(now)
        return self._trying, "probe", chosen

    def _earn(self) -> None:
        is_comparing = self._is_off and self.probing.can_compare
        self.budget.earn(is_comparing, is_far=self._is_off and self.probing.is_far)

    def _situation(self) -> Situation:
        assert self.plan is not None
        assert self._times is not None
        return Situation(
            self.plan,
            self._times,
            self._seen,
            self.cost.catch_up_token_s,
            self._may_mix(len(self._seen)),
        )

    def _may_mix(self, num_requests: int) -> bool:
        """Whether requests of a batch may have unequal draft lengths."""
        return 2 * num_requests > self.options.max_graph_rows

    @property
    def _habit(self) -> Habit:
        assert self._planned_for is not None
        return self._habits[self._planned_for]

    @property
    def _is_off(self) -> bool:
        return self.plan is not None and self.plan.depth == 0

    # -- explaining ---------------------------------------------------------------

    def estimate(self, outcome: StepOutcome) -> StepEstimate | None:
        """What the parts of a finished step took, as far as the cost model knows.

        Returns:
            None for steps with prefill, and for a batch of another size than the one
            that was planned for.
        """
        num_requests, times = outcome.num_decode_requests, self._times
        if outcome.num_prefill_tokens or times is None or self.plan is None:
            return None
        if not num_requests or self._planned_for is None:
            return None
        size = (request_bucket(num_requests), outcome.is_greedy)
        if size != (self._planned_for.size, self._planned_for.is_greedy):
            return None
        return StepEstimate(
            *step_parts(outcome, times, self.max_draft_length), self.plan.goodput
        )

    @property
    def calibration_error(self) -> float | None:
        """Of the chances that drafts are given; see `Calibration`."""
        return self.survival.calibration.error

    # -- learning -----------------------------------------------------------------

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a step; look for a better plan every few."""
        if self._is_ruled and outcome.draft_depth and not outcome.num_prefill_tokens:
            self._margins.learn(
                self._planned_for, outcome.draft_depth, self._uniform_depth
            )
        self._backlog.add(outcome)
        until_search = self._replan_steps - self._steps_since_plan
        if (
            self.plan is None
            or self.budget.is_urgent
            or self._backlog.must_be_learned(self._is_off, until_search)
        ):
            self._learn()

    def _learn(self) -> None:
        most, steps = self._backlog.affordable_outcomes(), self._backlog.take()
        examined: list[RequestOutcome] = []
        for outcome in steps:
            examined += outcome.requests
            examined += outcome.compared
            self.cost.observe(outcome)
        if examined:
            self._learn_acceptance(examined, len(steps), most)
        else:
            self.survival.wait(len(steps))
        self._steps_since_plan += len(steps)
        if self._planned_for is None:
            return
        self._habit.reluctance.pass_steps(len(steps))
        if self._steps_since_plan >= self._replan_steps or self.budget.is_urgent:
            self._replan(self._planned_for)

    def _learn_acceptance(
        self, examined: Sequence[RequestOutcome], num_steps: int, most: int
    ) -> None:
        is_promising = self._is_off and self._is_promising(examined)
        jump = self.survival.observe(examined, num_steps, most)
        if jump:
            self._replan_steps = 1
        if jump > 0 or is_promising:
            # Only good news are worth a closer look at any price.
            self.budget.surprise()
        elif self._is_off and not any(r.num_accepted_tokens for r in examined):
            self.budget.disappoint()

    def _is_promising(self, examined: Sequence[RequestOutcome]) -> bool:
        """Whether a probe from K = 0 accepted so much that drafting may pay now.

        A single request shows one token in a probe: too little for an alarm, enough
        for another look.
        """
        if self._times is None:
            return False
        num_accepted = sum(r.num_accepted_tokens > 0 for r in examined)
        one_s, off_s = (self._times.uniform(k, k).seconds for k in (1, 0))
        needed = len(examined) * (one_s / off_s - 1.0)
        expected: float = sum(
            self.survival.survival_of_class(class_id)[0]
            for request_id, *_ in examined
            if (class_id := self.survival.class_of.get(request_id)) is not None
        )
        # Some deviations of a Poisson variable, and a little for the smallest batch.
        usual = expected + 1.5 * math.sqrt(expected) + 0.25
        return num_accepted > max(needed, usual)

    def _replan(self, traits: BatchTraits) -> None:
        """Look for the best plan for the batch of the last decision."""
        requests, num_steps = self._seen, self._steps_since_plan
        self._steps_since_plan = 0
        is_news = traits != self._planned_for
        if is_news:
            self._enter(traits)
            num_steps = 0
        context = sum(request.num_context_tokens for request in requests)
        self._times = self.cost.times(
            len(requests), context / len(requests), traits.is_greedy
        )
        optimism = self.options.exploration.optimism
        keep = () if self.plan is None else (self.plan.depth,)
        batch = self._batch(requests)
        may_mix = self._may_mix(len(requests))
        found = plans(batch, self._times, self._depths, optimism, keep, may_mix)
        found = feasible(found, self.options.max_token_latency_s)
        before = self.plan
        self._uniform_depth = usual_depth(found) or self._uniform_depth
        is_bounded = self.options.max_token_latency_s is not None
        # The rule keeps no promise to a single request.
        by_rule = [] if is_bounded else selective_plans(batch, found, self._times)
        choices = best_of_each_depth(found + by_rule) if by_rule else found
        if before is not None and before.depth:
            self._habit.drafted(choices, num_steps)
        self._adopt(self._preferred(choices))
        if batch.groups:
            self.probing.look_for(found, self._situation(), by_rule)
        else:
            self.probing.look_for_nothing()
        assert self.plan is not None
        is_news |= before is None or before.depth != self.plan.depth
        self._replan_steps = self._steps_until_replan(is_news)

    def _enter(self, traits: BatchTraits) -> None:
        """Go on for batches of a kind as they were left."""
        self._planned_for = traits
        if traits not in self._habits:
            self._habits[traits] = Habit(self.plan)
            self.budget.be_curious()
        was_off, self.plan = self._is_off, self._habit.plan
        if self._is_off and not was_off:
            self.budget.be_curious()

    def _steps_until_replan(self, is_news: bool) -> int:
        assert self.plan is not None
        fewest = self.options.min_replan_steps
        if self.plan.depth:
            search_s = _SEARCH_S if len(self._seen) > 1 else _SEARCH_ALONE_S
            affordable = math.ceil(search_s / (_SEARCH_SHARE * self.plan.seconds))
            if affordable < fewest:
                return affordable
        if is_news or (self.budget.is_granted and self.probing.has_next):
            return fewest
        return min(2 * max(self._replan_steps, 4), self.options.max_replan_steps)

    def _batch(self, requests: Sequence[DecodeRequest]) -> Batch:
        may_split = self._may_stop(len(requests)) and len(requests) <= MAX_SPLIT
        return grouped(
            requests,
            self.survival,
            bounded=self._bounded,
            optimism=self.options.exploration.optimism,
            num_known=self.plan.depth if self.plan else 0,
            may_split=may_split,
        )

    def _preferred(self, found: list[Plan]) -> Plan:
        if self.plan is None:
            return max(found, key=_goodput)
        if not self._is_off:
            is_patient = self._habit.is_patient
            return preferred(found, self.plan, self.options.margin, 0.0, is_patient)
        catch_up_s = self._situation().catch_up_s
        margin = self._habit.reluctance.margin(self.options.margin)
        return preferred(found, self.plan, margin, catch_up_s)

    def _adopt(self, plan: Plan) -> None:
        if self.plan is not None and plan.depth != self.plan.depth:
            self.num_switches += 1
            self.probing.stop()
            if not plan.depth:
                self.budget.be_curious()  # nothing else will tell when to come back
            elif self._is_off:
                self._habit.resumed()
        self.plan = self._habit.plan = plan
        self._lengths = DraftLengths(plan, self.survival)
        self._stopping = None
