"""Chooses the draft length that promises the most committed tokens per second.

``observe`` learns (`survival`, `cost`) and every few steps looks for the best plan for
the batch it saw last (`planner`); ``decide`` only maps requests to classes and classes
to draft lengths, since it stands between two steps. A plan is a rule (depth and a cut
through survival), so requests that come and go in between are served by it, too.

The cost of drafting, paid in the step that drafts, and that of verifying, paid in the
next, belong to one decision: both are in the time that a plan is divided by.

Stable: another depth must promise ``margin`` more. Curious: plans that would be the
best if luck is with them are tried for a step or two, within a budget (`exploration`).
Never lost at K = 0: without drafts acceptance grows uncertain, so that sooner or later
drafting one token may well be the best, and is probed.

Deterministic: the same calls give the same decisions, on every rank.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from vllm_mtp.control.cost import CostModel, CostPrior, request_bucket
from vllm_mtp.control.cost_block import Estimate, Place, uniform_tier
from vllm_mtp.control.exploration import ExplorationBudget, ExplorationOptions
from vllm_mtp.control.planner import Batch, Group, PinnedGroup, Plan, plans
from vllm_mtp.control.survival import SurvivalModel, SurvivalOptions
from vllm_mtp.records import DecodeRequest, DraftDecision, StepOutcome


class GoodputOptions(NamedTuple):
    """How a `GoodputController` behaves; the defaults suit serving."""

    margin: float = 0.01
    """Gain in goodput that another depth must promise."""
    replan_steps: int = 8
    """Steps between two searches for the best plan."""
    max_step_time_s: float | None = None
    """Latency mode: only plans whose step is expected to take no longer."""
    survival: SurvivalOptions = SurvivalOptions()
    exploration: ExplorationOptions = ExplorationOptions()
    cost_prior: CostPrior = CostPrior()


_NOTHING = Plan(0, 0.0, True, 1.0, 1.0, 1.0)


class _Lengths(dict[int, int]):
    """Draft length of each class under a plan, computed when first asked for."""

    def __init__(self, plan: Plan, survival: SurvivalModel) -> None:
        super().__init__()
        self._plan, self._survival = plan, survival

    def __missing__(self, class_id: int) -> int:
        survival = self._survival.survival_of_class(class_id)
        length = self._plan.draft_length(survival)
        self[class_id] = length
        return length


class _Seen(NamedTuple):
    """The batch of the last decision."""

    # class -> requests whose draft length is free
    free: dict[int, int]
    # (class, draft length) -> requests that are pinned to it
    pinned: dict[tuple[int, int], int]
    num_requests: int
    context_per_request: float


class GoodputController:
    """Maximises expected goodput, online."""

    def __init__(
        self, max_draft_length: int, options: GoodputOptions | None = None
    ) -> None:
        self.max_draft_length = max_draft_length
        self.options = options or GoodputOptions()
        self.survival = SurvivalModel(max_draft_length, self.options.survival)
        self.cost = CostModel(max_draft_length, self.options.cost_prior)
        self.budget = ExplorationBudget(self.options.exploration)
        self.plan: Plan | None = None
        """The best one known; probes aside, what is decided."""
        self.num_switches = 0
        """How often the plan's depth has changed."""
        self.num_probes = 0
        self._lengths = _Lengths(_NOTHING, self.survival)
        self._times: dict[Place, Estimate] = {}
        self._probe: Plan | None = None
        """What would be tried next."""
        self._probed = _NOTHING
        """What is being tried."""
        self._probe_lengths = self._lengths
        self._probe_steps_left = 0
        self._seen: _Seen | None = None
        self._planned_bucket = 0
        self._steps_since_plan = 0
        self._refresh_at = 0

    # -- deciding -----------------------------------------------------------------

    def decide(self, requests: Sequence[DecodeRequest]) -> DraftDecision:
        """Draft depth and draft lengths by the current plan, or by a probe."""
        if not requests:
            depth = self.plan.depth if self.plan else 0
            return DraftDecision(depth, {}, "exploit")
        ids, contexts, _, pins = zip(*requests, strict=True)
        classes = self._classes(requests, ids)
        is_pinned = pins.count(None) != len(pins)
        self._note_batch(ids, contexts, classes, pins if is_pinned else ())
        if self.plan is None or request_bucket(len(ids)) != self._planned_bucket:
            self._replan()
        plan, lengths, reason = self._choose()
        chosen = dict(zip(ids, map(lengths.__getitem__, classes), strict=True))
        if reason == "probe" and self._is_off:
            self._keep_a_sample(chosen, ids)
        elif plan.last_class >= 0:
            self._serve_partly(chosen, plan, ids, classes)
        depth = plan.depth
        if is_pinned:
            depth = self._apply_pins(chosen, ids, pins, depth)
        return DraftDecision(depth, chosen, reason)

    def _classes(
        self, requests: Sequence[DecodeRequest], ids: Sequence[str]
    ) -> list[int]:
        """Class of each request; a few contexts are refreshed at each call."""
        survival = self.survival
        for _ in range(min(4, len(requests))):
            self._refresh_at = (self._refresh_at + 1) % len(requests)
            survival.see(requests[self._refresh_at])
        found = list(map(survival.class_of.get, ids))
        if None in found:
            for request in requests:
                if request.request_id not in survival.class_of:
                    survival.see(request)
            if len(survival.class_of) > 2 * len(ids) + 256:
                survival.keep_only(ids)
        return list(map(survival.class_of.__getitem__, ids))

    def _note_batch(
        self,
        ids: Sequence[str],
        contexts: Sequence[int],
        classes: Sequence[int],
        pins: Sequence[int | None],
    ) -> None:
        pinned: Counter[tuple[int, int]] = Counter()
        free: dict[int, int]
        if pins:
            free = Counter(c for c, p in zip(classes, pins, strict=True) if p is None)
            pinned.update(
                (class_id, self._bounded(pin))
                for class_id, pin in zip(classes, pins, strict=True)
                if pin is not None
            )
        else:
            free = Counter(classes)
        self._seen = _Seen(free, pinned, len(ids), sum(contexts) / len(ids))

    def _keep_a_sample(self, chosen: dict[str, int], ids: Sequence[str]) -> None:
        """Draft for some requests only, each time for others."""
        size = self._sample_size(len(ids))
        if size < len(ids):
            first = (self.num_probes * size) % len(ids)
            sample = (*ids[first:], *ids[:first])[:size]
            kept = {request_id: chosen[request_id] for request_id in sample}
            chosen.update(dict.fromkeys(chosen, 0))
            chosen.update(kept)

    def _sample_size(self, num_requests: int) -> int:
        if self.budget.is_granted:
            return num_requests
        return min(self.options.exploration.sample_requests, num_requests)

    def _serve_partly(
        self,
        chosen: dict[str, int],
        plan: Plan,
        ids: Sequence[str],
        classes: Sequence[int],
    ) -> None:
        """Take the draft token at the cut from those whom the plan has no rows for."""
        last_class = plan.last_class
        members = [i for i, c in zip(ids, classes, strict=True) if c == last_class]
        for request_id in members[plan.num_of_last_class :]:
            chosen[request_id] = max(chosen[request_id] - 1, 0)

    def _bounded(self, pin: int) -> int:
        return min(max(pin, 0), self.max_draft_length)

    def _apply_pins(
        self,
        chosen: dict[str, int],
        ids: Sequence[str],
        pins: Sequence[int | None],
        depth: int,
    ) -> int:
        for request_id, pin in zip(ids, pins, strict=True):
            if pin is not None:
                chosen[request_id] = self._bounded(pin)
                depth = max(depth, chosen[request_id])
        return depth

    def _choose(self) -> tuple[Plan, _Lengths, str]:
        assert self.plan is not None
        self.budget.earn()
        if self._probe is not None and self._probe_steps_left == 0:
            self._start_probe(self._probe)
        if self._probe_steps_left > 0:
            self._probe_steps_left -= 1
            return self._probed, self._probe_lengths, "probe"
        return self.plan, self._lengths, "exploit" if self.plan.depth else "off"

    def _start_probe(self, probe: Plan) -> None:
        if not self.budget.pay(self._price(probe)):
            return
        # Two in a row, where neither the step before nor the one after is like it, so
        # that one step both drafts and verifies as the probe says.
        self._probe_steps_left = 1 if self._is_off else 2
        self.num_probes += 1
        self._probed = probe
        self._probe_lengths = _Lengths(probe, self.survival)

    @property
    def _is_off(self) -> bool:
        return self.plan is not None and self.plan.depth == 0

    def _price(self, probe: Plan) -> float:
        """Time lost by a probe, in steps of the best plan."""
        assert self.plan is not None
        if self._is_off:
            # Drafting and verifying apart, each beside the other half of a step
            # without drafts; the first has been seen with its catch-up pass.
            assert self._seen is not None
            drafting = self._times[uniform_tier(0), probe.depth].seconds
            verifying = self._times[uniform_tier(probe.depth), 0].seconds
            share = self._sample_size(self._seen.num_requests) / self._seen.num_requests
            extra = max(verifying - self.plan.seconds, 0.0)
            seconds = drafting + share * extra
        else:
            seconds = probe.seconds
        lost_s = seconds - probe.tokens / self.plan.goodput
        return max(lost_s, 0.0) / self.plan.seconds

    # -- learning -----------------------------------------------------------------

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a step; look for a better plan every few."""
        if self.survival.observe(outcome.requests):
            self.budget.surprise()
        self.cost.observe(outcome)
        self._steps_since_plan += 1
        is_due = self._steps_since_plan >= self.options.replan_steps
        if self._seen is not None and (is_due or self.budget.is_urgent):
            self._replan()

    def _replan(self) -> None:
        assert self._seen is not None
        self._steps_since_plan = 0
        self._planned_bucket = request_bucket(self._seen.num_requests)
        self._times = self.cost.table(
            self._seen.num_requests, self._seen.context_per_request
        )
        found = list(
            plans(
                self._batch(self._seen),
                self._times,
                self.max_draft_length,
                self.options.exploration.optimism,
            )
        )
        found = self._feasible(found)
        best = max(found, key=lambda plan: plan.goodput)
        self._adopt(self._prefer_current(best, found))
        self._probe = self._worth_a_probe(found)

    def _batch(self, seen: _Seen) -> Batch:
        survival, optimism = self.survival, self.options.exploration.optimism
        num_known = self.plan.depth if self.plan else 0
        return Batch(
            [
                Group(
                    class_id,
                    count,
                    survival.survival_of_class(class_id),
                    survival.optimistic_survival_of_class(
                        class_id, optimism, num_known
                    ),
                )
                for class_id, count in seen.free.items()
            ],
            [
                PinnedGroup(count, length, survival.survival_of_class(class_id))
                for (class_id, length), count in seen.pinned.items()
            ],
        )

    def _feasible(self, found: list[Plan]) -> list[Plan]:
        bound = self.options.max_step_time_s
        if bound is None:
            return found
        return [p for p in found if p.seconds <= bound] or [
            min(found, key=lambda plan: plan.seconds)
        ]

    def _prefer_current(self, best: Plan, found: list[Plan]) -> Plan:
        """The best plan of the kind in use, unless another kind is clearly better."""
        current = self.plan
        if current is None:
            return best
        same = [
            p
            for p in found
            if p.depth == current.depth and p.is_uniform == current.is_uniform
        ]
        if not same:
            return best
        kept = max(same, key=lambda plan: plan.goodput)
        return best if best.goodput > kept.goodput * (1 + self.options.margin) else kept

    def _adopt(self, plan: Plan) -> None:
        if self.plan is not None and plan.depth != self.plan.depth:
            self.num_switches += 1
        self.plan = plan
        self._lengths = _Lengths(plan, self.survival)

    def _worth_a_probe(self, found: list[Plan]) -> Plan | None:
        """What may well beat the plan, cheapest for what it promises."""
        assert self.plan is not None
        needed = self.plan.goodput * (1 + self.options.margin)
        slowest = self.plan.seconds * self.options.exploration.max_slowdown
        others = [
            p
            for p in found
            if p.seconds <= slowest
            and (p.depth, p.is_uniform) != (self.plan.depth, self.plan.is_uniform)
        ]
        hopeful = [p for p in others if p.optimistic_goodput > needed]
        if hopeful:
            return max(
                hopeful,
                key=lambda p: (
                    (p.optimistic_goodput / needed - 1) / (self._price(p) + 0.02),
                    -p.depth,
                ),
            )
        if self._is_off:
            # However hopeless: without drafts nobody would notice that it changed.
            return min(others, key=self._price, default=None)
        return None
