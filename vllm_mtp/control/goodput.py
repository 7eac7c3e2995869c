"""Chooses the draft length that promises the most committed tokens per second.

``observe`` learns acceptance (`survival`) and cost (`cost`). Every few steps a `search`
finds the best plan of each depth for the batch of the last decision; ``decide`` only
maps requests to classes and classes to draft lengths, since it stands between two
steps. A plan is a rule (depth and a cut through survival), so it serves requests that
come and go in between, too.

Three rules choose: `hysteresis` between depths, Thompson sampling within one cap, and
shadow drafts while drafting is disabled (both in `exploration`). Where the worker can
see its drafts, a plan of depth > 0 only says that drafting pays and what time is
worth; how deep is left to a stop rule (`stopping`).

Deterministic: the same calls give the same decisions, on every rank.
"""

import math
from collections.abc import Collection, Sequence
from random import Random

from vllm_mtp.control.backlog import PERIOD_S, STEPS_AT_ONCE, Backlog
from vllm_mtp.control.copied_drafts import CopiedDrafts
from vllm_mtp.control.cost import CostModel
from vllm_mtp.control.draft_lengths import DraftLengths
from vllm_mtp.control.exploration import (
    EXPLORATION_STEPS,
    SHADOW_PERIOD_STEPS,
    Exploration,
    ExplorationCap,
    Situation,
    shadow_sample,
)
from vllm_mtp.control.grouping import BatchKind, is_of_kind, kind_of
from vllm_mtp.control.hysteresis import SWITCH_STEPS, Hysteresis
from vllm_mtp.control.options import GoodputOptions
from vllm_mtp.control.planner import Plan, goodput
from vllm_mtp.control.search import Found, Search
from vllm_mtp.control.step_parts import step_parts
from vllm_mtp.control.stopping import MAX_STOPPING, Stopping
from vllm_mtp.control.survival import SurvivalModel
from vllm_mtp.records import (
    DecodeRequest,
    DraftDecision,
    RequestOutcome,
    StepEstimate,
    StepOutcome,
)

_MIN_SEARCH_STEPS, _MAX_SEARCH_STEPS = EXPLORATION_STEPS + 1, SHADOW_PERIOD_STEPS
"""Between two searches, if `PERIOD_S` is not between them."""
MIN_PLAIN_STEPS = 2
"""Steps without speculation that are run of each kind of batch first, so that what
drafting costs beside them, and the promise to users, rests on a measurement. Held-out
worlds, whose cost never jumps between two sizes, neither gain nor lose by it."""
_OFF = Plan(0, 0.0, 1.0, 1.0, 1.0)


class GoodputController:
    """Maximises expected goodput, online."""

    def __init__(
        self, max_draft_length: int, options: GoodputOptions | None = None
    ) -> None:
        """Begin with priors.

        Args:
            max_draft_length: Upper bound on K.
            options: What the engine can do.
        """
        self.max_draft_length = max_draft_length
        self.survival = SurvivalModel(max_draft_length)
        options = options or GoodputOptions()
        if options.copies:
            self.survival.copies = SurvivalModel(max_draft_length)
        self._copied_drafts = CopiedDrafts(self.survival, options.copies_drafts)
        self.cost = CostModel(max_draft_length, options.cost_prior)
        self.cap = ExplorationCap()
        self.plan: Plan | None = None
        """The best one known; exploration aside, what is decided."""
        self._set_options(options)
        self._stopping = Stopping(self.survival)
        self._random = Random(options.seed)
        self._hysteresis = Hysteresis()
        self._backlog = Backlog()
        self._found: Found | None = None
        self._seen: Sequence[DecodeRequest] = ()
        """The batch of the last decision."""
        self._kind: BatchKind | None = None
        self._plan_of: dict[BatchKind, Plan] = {}
        self._exploration: Exploration | None = None
        self._may_draft = True
        """Slots for drafts are reserved in this step."""
        self._search_steps = _MIN_SEARCH_STEPS
        self._steps_since_search = self._steps_since_shadow = 0

    def _set_options(self, options: GoodputOptions) -> None:
        self.options = options
        self._depths = options.depths or tuple(range(self.max_draft_length + 1))
        self._can_be_off = 0 in self._depths
        self._lengths = DraftLengths(self.survival, self._depths)
        self._search = Search(
            self.survival, self.cost, options, self._depths, self._lengths.bounded
        )

    def allow_any_mix(self) -> None:
        """Choose from all depths and mixes; the plan in use stays until a search."""
        self._set_options(self.options._replace(depths=None, max_graph_rows=0))

    # -- deciding -----------------------------------------------------------------

    @property
    def _is_off(self) -> bool:
        """Drafting is disabled, exploration aside."""
        return self._can_be_off and self.plan is not None and not self.plan.depth

    @property
    def _is_idle(self) -> bool:
        """Nothing is proposed, exploration aside."""
        return self._is_off and (self._kind is None or not self._kind.is_copying)

    def may_draft(self) -> bool:
        """Whether the next decision may be to draft; it is kept to that."""
        if self._is_off and self._exploration is None:
            self._shadow_if_due()
        self._may_draft = not self._is_idle or self._exploration is not None
        return self._may_draft

    def num_undecided_steps(self) -> int:
        """Steps that need no decision, the next one included."""
        if not self._is_idle or self._exploration is not None:
            return 0
        until_search = self._steps_until_search - len(self._backlog)
        return max(min(until_search, SHADOW_PERIOD_STEPS - self._steps_since_shadow), 0)

    def observe_undecided(self, outcomes: Sequence[StepOutcome]) -> None:
        """Learn from steps that passed without a decision."""
        for outcome in outcomes:
            self._steps_since_shadow += 1
            self.observe(outcome)

    def decide(self, requests: Sequence[DecodeRequest]) -> DraftDecision:
        """Draft depth and draft lengths by the plan, or by an exploration."""
        if not requests:
            # Ranks that may not differ draft as deep as the others even so.
            return DraftDecision(0 if self._can_be_off else self._depths[0], {}, "idle")
        _, _, are_greedy, pins, _, are_constrained, are_copying = zip(
            *requests, strict=True
        )
        self._seen = requests
        kind = kind_of(are_greedy, are_constrained, are_copying)
        if self.plan is None or kind != self._kind:
            self._enter(kind)
        self._steps_since_shadow += 1
        plan, reason, verified = self._next_plan()
        depth = plan.depth
        if depth and reason == "exploit" and self._may_stop and not any(pins):
            return self._or_copied(self._until_it_does_not_pay(plan))
        chosen = self._lengths.of(requests, plan)
        if verified is not None:
            chosen = {i: k if i in verified else 0 for i, k in chosen.items()}
        if pins.count(None) != len(pins):
            depth = self._lengths.pin(chosen, requests, depth)
        copies = self.survival.copies
        if copies is None or not kind.is_copying:
            return DraftDecision(depth, chosen, reason)
        longest = self._lengths.continued(requests, plan, chosen)
        acceptance = copies.mean_acceptance
        decision = DraftDecision(depth, chosen, reason, None, longest, acceptance)
        return decision if reason == "explore" else self._or_copied(decision)

    def _or_copied(self, decision: DraftDecision) -> DraftDecision:
        """Where contexts offer drafts that are worth more, those."""
        assert self.plan is not None
        assert self._found is not None
        if not self._may_draft:
            return decision
        times = self._found.times
        lengths = self._copied_drafts.lengths(self.plan, times, self._seen)
        return decision._replace(copied_drafts=lengths)

    def _next_plan(self) -> tuple[Plan, str, Collection[str] | None]:
        """Plan of this step, why, and whose drafts are verified; None for all."""
        assert self.plan is not None
        exploration = self._exploration
        if not self._may_draft:
            return _OFF, "off", None
        if exploration is None:
            return self.plan, "off" if self._is_off else "exploit", None
        exploration.steps_left -= 1
        if not exploration.steps_left:
            self._exploration = None
        verified = self._verified_of_shadow() if exploration.is_shadow else None
        return exploration.plan, "explore", verified

    @property
    def _may_stop(self) -> bool:  # the worker, drafts of this batch by a rule
        return self.options.stops_early and len(self._seen) <= MAX_STOPPING

    def _until_it_does_not_pay(self, plan: Plan) -> DraftDecision:
        """Leave the draft lengths to the worker, which sees the drafts."""
        assert self._found is not None
        is_bounded = self.options.max_token_latency_s is not None
        depth = plan.depth if is_bounded else self._depths[-1]
        rule = self._stopping.rule(
            plan, self._found.times, self._seen, depth, self._kind
        )
        chosen = {
            r.request_id: depth if r.pinned_draft_length is None else 0
            for r in self._seen
        }
        depth = depth if rule.chances else 0
        return DraftDecision(depth, chosen, "exploit", rule if depth else None)

    # -- exploring ----------------------------------------------------------------

    @property
    def _situation(self) -> Situation:
        assert self.plan is not None
        assert self._found is not None
        price_s = self.cost.backfill_token_s
        return Situation(self.plan, self._found.times, self._seen, price_s)

    def _verified_of_shadow(self) -> Collection[str]:
        """Requests whose shadow draft is verified."""
        options, seen = self.options, self._seen
        is_drawn = options.draws_drafts and not all(r.is_greedy for r in seen)
        if options.sees_shadow_drafts and not is_drawn:
            return ()
        return shadow_sample(seen, options.may_mix(len(seen)))

    def _shadow_if_due(self) -> None:
        if self._steps_since_shadow < SHADOW_PERIOD_STEPS or self._found is None:
            return
        draft, now = self._found.shallowest_draft, self._situation
        if draft is None:
            return
        price_s = now.shadow_price_s(draft, self._verified_of_shadow())
        # Asked again a few steps later where the cap does not allow it.
        self._steps_since_shadow = SHADOW_PERIOD_STEPS - STEPS_AT_ONCE
        if self.cap.pay(price_s, now.plan.seconds):
            self._steps_since_shadow = 0
            self._exploration = Exploration(draft._replace(cut=0.0), 1, is_shadow=True)

    def _explore(self) -> None:
        """Run what is best in a sample, if it is another depth and the cap allows."""
        assert self._kind is not None
        assert self._found is not None
        now, found = self._situation, self._found
        best = found.at(0) if self._needs_plain_step else None
        if best is None:
            draw = found, self._seen, self._kind, self._random
            best = self._search.best_in_sample(*draw)
        if best.depth != now.plan.depth and self.cap.pay(
            now.price_s(best, SWITCH_STEPS), now.plan.seconds
        ):
            self._exploration = Exploration(best, EXPLORATION_STEPS)

    # -- explaining ---------------------------------------------------------------

    def estimate(self, outcome: StepOutcome) -> StepEstimate | None:
        """What the parts of a finished step took, as far as the cost model knows.

        None for steps with prefill, and for a batch of another kind than planned for.
        """
        if self._found is None or self.plan is None or self._kind is None:
            return None
        if not is_of_kind(outcome, self._kind):
            return None
        parts = step_parts(outcome, self._found.times, self.max_draft_length)
        return StepEstimate(*parts, self.plan.goodput)

    @property
    def calibration_error(self) -> float | None:
        """Of the chances that drafts are given; see `Calibration`."""
        return self.survival.calibration.error

    # -- learning -----------------------------------------------------------------

    @property
    def _steps_until_search(self) -> int:
        return max(self._search_steps - self._steps_since_search, 1)

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a step; search for a better plan every few."""
        self._stopping.observe(outcome)
        self._backlog.add(outcome)
        if self.plan is None or self._backlog.is_due(
            self._is_off, self._steps_until_search
        ):
            self._learn()
            is_due = self._steps_since_search >= self._search_steps
            if self.plan is None or not is_due or self._exploration is not None:
                return
            if self._replan().has_choice:
                self._explore()

    def _learn(self) -> None:
        steps, seconds, most = self._backlog.take()
        examined: list[RequestOutcome] = []
        for outcome in steps:
            examined += outcome.requests
            examined += outcome.shadow_drafts
        self.cost.observe(*steps)
        self.survival.observe(examined, len(steps), most)
        if self.survival.copies is not None:
            behind = [copy for outcome in steps for copy in outcome.copies]
            self.survival.copies.observe(behind, len(steps), most)
            self._copied_drafts.observe(steps, most)
        self._steps_since_search += len(steps)
        self._hysteresis.pass_steps(len(steps))
        if self.plan is not None:
            self.cap.earn(seconds, self.plan.seconds)

    def _enter(self, kind: BatchKind) -> None:
        """Go on for batches of a kind as they were left."""
        if len(self._backlog):
            self._learn()  # of other batches, maybe, but from now on it counts
        self._kind, self._exploration = kind, None
        self.plan = self._plan_of.get(kind, self.plan)
        if self._replan().has_choice and self._needs_plain_step:
            self._explore()

    @property
    def _needs_plain_step(self) -> bool:
        assert self._kind is not None
        size, is_greedy = len(self._seen), self._kind.is_greedy
        return self.cost.num_plain_steps(size, is_greedy) < MIN_PLAIN_STEPS

    def _replan(self) -> Found:
        """Find the best plan for the batch of the last decision."""
        assert self._kind is not None
        self._steps_since_search = 0
        found = self._search.find(self._seen, self._kind, self._may_stop)
        self._found = found
        self._stopping.uniform_depth = found.uniform_depth
        plan = max(found.plans, key=goodput)
        if self.plan is not None:
            backfill_s = self._situation.backfill_s
            plan = self._hysteresis.choose(found.plans, self.plan.depth, backfill_s)
        before = self._plan_of.get(self._kind)
        if before is not None and before.depth != plan.depth:
            self._hysteresis.changed()
            self._steps_since_shadow = 0
        self.plan = self._plan_of[self._kind] = plan
        steps = math.ceil(PERIOD_S / plan.seconds)
        self._search_steps = min(max(steps, _MIN_SEARCH_STEPS), _MAX_SEARCH_STEPS)
        return found
