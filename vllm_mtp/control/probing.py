"""Which decision to try next, and what trying it costs.

A probe is a plan that is not the best one known, but may be: with luck in what it
accepts, or in how long it takes. Never lost at K = 0: there *something* is tried now
and then, verified or, where that is possible and cheaper, only compared with what the
target samples (verifying costs more and brings tokens; where drafting is nearly worth
it, it costs next to nothing). Not where drafts are drawn from the proposal: two draws
from flat distributions hardly ever agree, but are nearly always accepted.
"""

from collections.abc import Sequence
from typing import NamedTuple

from vllm_mtp.control.cost import ExpectedTimes
from vllm_mtp.control.exploration import ExplorationBudget, ExplorationOptions
from vllm_mtp.control.planner import Plan
from vllm_mtp.control.preference import DRAFTING_PREMIUM
from vllm_mtp.records import (
    CATCH_UP_TOKENS_PER_REQUEST,
    MIN_CATCH_UP_TOKENS,
    DecodeRequest,
)

_OFF_NEARLY_AS_GOOD = 0.8
"""Of the best goodput: from there on K = 0 is tried without any luck. What a step
without drafts takes is guessed while all others draft (22 ms where it was 19, with
little doubt), and never to be slower than that is a promise."""
_CHEAP_CATCH_UP_STEPS = 0.2
"""Time of catching up, in steps, that is not worth waiting for a cheaper moment."""
_WAITS_STEPS = 64
"""For a better moment. Catching up two requests of thirty tokens took as long as all
else of a probe, and eight that had just begun would have said four times as much."""
_EARLY_TOKENS = 2
_MOST_EARLY_PROBES = 7
"""In a row, of requests that have so few tokens: what is accepted of a request's first
tokens need not be what is accepted of its later ones."""


class Situation(NamedTuple):
    """What a probe is measured against."""

    plan: Plan
    """The best one known."""
    times: ExpectedTimes
    requests: Sequence[DecodeRequest]
    """The batch of the last decision."""
    catch_up_token_s: float

    @property
    def is_off(self) -> bool:
        return self.plan.depth == 0

    @property
    def num_unseen_tokens(self) -> int:
        return sum(request.num_unseen_tokens for request in self.requests)

    @property
    def is_early(self) -> bool:
        """Requests have just begun, if drafting has been off for a while."""
        return self.num_unseen_tokens <= _EARLY_TOKENS * len(self.requests)

    @property
    def is_cheap_to_catch_up(self) -> bool:
        return self.catch_up_s <= _CHEAP_CATCH_UP_STEPS * self.plan.seconds

    @property
    def catch_up_s(self) -> float:
        """Time of what is caught up on in a step that drafts."""
        # No step catches up on more; the others wait.
        per_request = CATCH_UP_TOKENS_PER_REQUEST * len(self.requests)
        limit = max(MIN_CATCH_UP_TOKENS, per_request)
        return min(self.num_unseen_tokens, limit) * self.catch_up_token_s


class Probe(NamedTuple):
    """A plan to be tried."""

    plan: Plan
    compares: bool = False
    """It drafts but verifies nothing."""


class Probing:
    """Finds probes and carries them out, within a budget."""

    def __init__(
        self,
        options: ExplorationOptions,
        margin: float,
        compares_drafts: bool,
        draws_drafts: bool = False,
    ) -> None:
        """Begin with nothing to try.

        Args:
            options: Bounds of exploration.
            margin: Gain that another plan must promise.
            compares_drafts: Drafts can be compared without being verified.
            draws_drafts: Those of sampled requests are drawn from the proposal.
        """
        self.options = options
        self.budget = ExplorationBudget(options)
        self.num_probes = 0
        self._margin = margin
        self.can_compare = compares_drafts
        """Whether that goes for the batch of the last search."""
        self._compares_drafts = compares_drafts
        self._draws_drafts = draws_drafts
        self._next: Probe | None = None
        """What would be tried next."""
        self._usual_price = 0.0
        """Of that when it was found; asked for anew when it begins."""
        self._current: Probe | None = None
        self._steps_left = 0
        self._tried_off = False
        """The last probe was of K = 0."""
        self._num_waited = 0
        """Steps for which a probe has waited that could be paid."""
        self._num_early_probes = 0
        """In a row, of requests that had just begun."""

    def may_draft_while_off(self, now: Situation) -> bool:
        """Whether the next step may be one of a probe. Asked once a step."""
        if self._steps_left > 0:
            return True
        if self._next is None or not self.budget.can_pay(self._usual_price):
            return False
        return not self._waits(now)

    def step(self, now: Situation) -> Probe | None:
        """What this step tries; None for the plan in use."""
        if self._next is not None and self._steps_left == 0:
            self._begin(self._next, now)
        if self._steps_left == 0:
            return None
        self._steps_left -= 1
        return self._current

    @property
    def is_over(self) -> bool:
        """No further step of the probe follows."""
        return self._steps_left == 0

    def stop(self) -> None:
        """The batch is another one: what is under way was not meant for it."""
        self._steps_left = 0

    def _begin(self, probe: Probe, now: Situation) -> None:
        if not self.budget.pay(self._price(probe, now)):
            return
        self._num_waited = 0
        self._num_early_probes = self._num_early_probes + 1 if now.is_early else 0
        # Two in a row, where neither the step before nor the one after is like it, so
        # that one step both drafts and verifies as the probe says.
        self._steps_left = 1 if now.is_off else 2
        if not now.is_off and not self.budget.is_granted:
            self.budget.be_patient()
        self.num_probes += 1
        self._current, self._next = probe, None
        self._tried_off = probe.plan.depth == 0

    # -- while drafting is off ----------------------------------------------------

    def _waits(self, now: Situation) -> bool:
        """Whether a probe that can be paid had better wait for another moment."""
        if self.budget.is_urgent:
            return False
        wants_later_tokens = self._num_early_probes >= _MOST_EARLY_PROBES
        if now.is_early:
            is_worse = wants_later_tokens
        else:
            is_worse = not wants_later_tokens and not now.is_cheap_to_catch_up
        self._num_waited += is_worse
        return is_worse and self._num_waited <= _WAITS_STEPS

    def sample(self, requests: Sequence[DecodeRequest]) -> set[str]:
        """Requests that get a draft in a probe from K = 0.

        Each time others, those with the least to catch up on.
        """
        size = self._sample_size(len(requests))
        first = (self.num_probes * size) % len(requests)
        others_first = (*requests[first:], *requests[:first])
        chosen = sorted(others_first, key=lambda r: r.num_unseen_tokens)[:size]
        return {request.request_id for request in chosen}

    def _sample_size(self, num_requests: int) -> int:
        if self.budget.is_granted:
            return num_requests
        return min(self.options.sample_requests, num_requests)

    # -- prices -------------------------------------------------------------------

    def _price(self, probe: Probe, now: Situation) -> float:
        """Time lost by a probe, in steps of the best plan."""
        if probe.compares:
            return self._price_of_comparing(probe.plan, now)
        return self._price_of_verifying(probe.plan, now)

    def _price_of_comparing(self, plan: Plan, now: Situation) -> float:
        drafting_s = now.times.uniform(0, plan.depth).seconds - now.plan.seconds
        lost_s = drafting_s + now.catch_up_s
        return max(lost_s, 0.0) / now.plan.seconds

    def _price_of_verifying(self, plan: Plan, now: Situation) -> float:
        if now.is_off:
            # Drafting and verifying apart, each beside the other half of a step
            # without drafts.
            off_s = now.plan.seconds
            num_requests = max(len(now.requests), 1)
            drafting_s = now.times.uniform(0, plan.depth).seconds - off_s
            verifying_s = now.times.uniform(plan.depth, 0).seconds - off_s
            size = self._sample_size(num_requests)
            share = size / num_requests
            lost_s = max(drafting_s, 0.0) + share * max(verifying_s, 0.0)
            # What is accepted is no loss.
            lost_s -= share * (plan.tokens / num_requests - 1.0) * off_s
            lost_s += now.catch_up_s
        else:
            lost_s = plan.seconds - plan.tokens / now.plan.goodput
        return max(lost_s, 0.0) / now.plan.seconds

    # -- finding ------------------------------------------------------------------

    def look_for(self, found: Sequence[Plan], now: Situation) -> None:
        """Choose what to try next among the plans of a search."""
        self.can_compare = self._compares_drafts and not (
            self._draws_drafts and any(not r.is_greedy for r in now.requests)
        )
        self._next = self._worth_a_try(found, now)
        self._usual_price = self._price(self._next, now) if self._next else 0.0

    def look_for_nothing(self) -> None:
        """There is nobody to try anything with."""
        self._next = None

    def _worth_a_try(self, found: Sequence[Plan], now: Situation) -> Probe | None:
        """What may well beat the plan, cheapest for what it promises."""
        slowest = now.plan.seconds * self.options.max_slowdown
        others = [
            p
            for p in found
            if p.seconds <= slowest
            and (p.depth, p.is_uniform) != (now.plan.depth, now.plan.is_uniform)
        ]
        hopeful = [p for p in others if self._promise(p, now) > 0.0]
        if now.is_off and self.can_compare:
            # What would be better if only it were faster must be run. What may be
            # better if more is accepted is looked at in the cheapest way, even after a
            # surprise: more looks for the same price.
            needed = now.plan.goodput * (1 + self._margin)
            hopeful = [p for p in hopeful if p.bold_goodput > needed]
            if not hopeful:
                return self._cheapest_look(others, now)
        if not hopeful and now.is_off:
            # However hopeless: without drafts nobody would notice that it changed.
            hopeful = sorted(others, key=lambda p: self._price_of_verifying(p, now))[:1]
        off = self._off_worth_a_try(others, now)
        if off is not None and not (hopeful and self._tried_off):
            return Probe(off)
        if not hopeful:
            return None
        return Probe(max(hopeful, key=lambda p: self._promise_for_price(p, now)))

    def _cheapest_look(self, others: Sequence[Plan], now: Situation) -> Probe | None:
        """At what is accepted: compared or, where enough of it is, verified."""
        probes = [
            Probe(plan, compares) for plan in others for compares in (True, False)
        ]
        return min(
            probes,
            key=lambda probe: self._price(probe, now) / self._num_looks(probe, now),
            default=None,
        )

    def _num_looks(self, probe: Probe, now: Situation) -> int:
        num_requests = max(len(now.requests), 1)
        return num_requests if probe.compares else self._sample_size(num_requests)

    def _off_worth_a_try(self, others: Sequence[Plan], now: Situation) -> Plan | None:
        """K = 0, before other depths: it comes before being faster still."""
        off = next((p for p in others if p.depth == 0), None)
        if off is None or now.is_off:
            return None
        is_close = off.goodput >= _OFF_NEARLY_AS_GOOD * now.plan.goodput
        return off if is_close or self._promise(off, now) > 0.0 else None

    def _promise(self, plan: Plan, now: Situation) -> float:
        """Gain beyond what would change the decision, with luck; see `preferred`."""
        needed = 1 + self._margin if plan.depth else 1 / (1 + DRAFTING_PREMIUM)
        return plan.optimistic_goodput / (now.plan.goodput * needed) - 1.0

    def _promise_for_price(self, plan: Plan, now: Situation) -> tuple[float, float]:
        price = self._price_of_verifying(plan, now)
        return self._promise(plan, now) / (price + 0.02), -plan.depth
