"""Which decision to try next, and what trying it costs.

A probe is a plan that is not the best one known, but may be: with luck in what it
accepts, or in how long it takes. Never lost at K = 0: there *something* is tried now
and then, verified or, where that is possible and cheaper, only compared with what the
target samples. Not where drafts are drawn from the proposal and nobody tests them: two
draws from flat distributions hardly ever agree, but are nearly always accepted.
"""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.control.previous.expected_times import ExpectedTimes
from benchmarks.control.previous.exploration import (
    ExplorationBudget,
    ExplorationOptions,
)
from benchmarks.control.previous.planner import Plan
from benchmarks.control.previous.preference import DRAFTING_PREMIUM
from vllm_mtp.control.catching_up import most_caught_up_now
from vllm_mtp.records import DecodeRequest

_OFF_NEARLY_AS_GOOD = 0.8
"""Of the best goodput: from there on K = 0 is tried without any luck. What a step
without drafts takes is guessed while all others draft (22 ms where it was 19, with
little doubt), and never to be slower than that is a promise."""
_DEVIATIONS_OF_A_GUESS = 3.0
"""With so much luck K = 0 need only be as good as the plan while what its steps take is
a guess. Where drafting doubled a step, 7 of 100 starts went on with it for hundreds of
steps, at 0.8 of the speed without: that K = 0 is so much faster was beyond all luck."""
_FAR = 0.95
"""Of the best goodput: what is less, even with luck, is far from paying."""
_OFF_CLOSE = 0.95
_OFF_TRIAL_STEPS = 8
"""Where K = 0 is so close to the best goodput it is tried for so many in a row, which
costs next to nothing: a plain step now and then says little of what they take on a
machine whose speed jumps, and there drafting went on for minutes at a loss of 6 %."""
_UNSURE_OF_OFF = 0.05
"""Deviation of what a step without drafts is believed to take from which K = 0, where
it is close, is tried without a long pause. After hundreds of steps that were well
drafted for, probes follow each other slowly; when acceptance fell to where drafting
lost 9 % (and was thought to gain: plain steps were believed to take 47 ms and took 42),
none of 500 steps was a plain one, with savings that would have paid for dozens."""
_DOUBTS_OF_OFF = 1.5
"""With so many deviations of luck K = 0 need only be as good as the plan to be tried
without a long pause, where it is not close by expectation. After one plain step that
was disturbed, drafting a token was believed to cost a seventh of a step and cost two
fifths; while less and less was accepted that seemed to pay, and lost up to 17 % for 130
steps, with savings for a dozen probes and one probe every 128 steps."""
_OFF_AGAIN_STEPS = 8
"""Or drafting would not be seen while K = 0 seems as good and costs nothing to try."""
_TRIAL_STEPS = 16
_TRIAL_STEPS_OF_SEVERAL = 8
"""Of a batch, which shows that much of each of its requests. One that fails costs two
steps of 16 requests where it is twice as long."""
_TRIAL_STEP_PRICE = 0.25
_MAX_TRIAL_STEP_PRICE = 0.04
"""Of a single look's price, and of a step: where a step with drafts is expected to lose
no more, drafting is tried for a while. For the price of a few looks they show
many tokens of every request, and later and later ones, where single looks most often
see the first (of some texts 45 % were accepted at first and 70 % after twenty)."""
_TRIAL_FAILED = 0.93
"""Of the goodput without drafts: a trial that is expected to bring less ends early. It
begins when estimates are at their luckiest, and what follows is mostly less."""
_CHEAP_CATCH_UP_STEPS = 0.2
"""Time of catching up, in steps, that is not worth waiting for a cheaper moment."""
_WAITS_STEPS = 96
"""After a moment with little to catch up on a probe waits for the next one: catching up
two requests of thirty tokens took as long as all else of a probe, and eight that had
just begun would have said four times as much. Where requests are long it does not, or
it would only see what is accepted of their first tokens."""
_UNTIL_THE_NEXT_SEARCH = 32
"""Steps without a search at most, about."""


class Situation(NamedTuple):
    """What a probe is measured against."""

    plan: Plan
    """The best one known."""
    times: ExpectedTimes
    requests: Sequence[DecodeRequest]
    """The batch of the last decision."""
    catch_up_token_s: float
    may_mix: bool = True
    """Requests may have unequal draft lengths."""

    @property
    def is_off(self) -> bool:
        return self.plan.depth == 0

    @property
    def catch_up_s(self) -> float:
        """Time of what is caught up on in a step that drafts."""
        num_unseen = [request.num_pending_tokens for request in self.requests] or [0]
        return most_caught_up_now(num_unseen) * self.catch_up_token_s


class Probe(NamedTuple):
    """A plan to be tried, for a step or two, or as a trial for longer."""

    plan: Plan
    compares: bool = False
    """It drafts but verifies nothing."""
    num_steps: int = 1
    is_close_off: bool = False
    """K = 0, which is about as good as the plan: a trial."""


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
            draws_drafts: Those of sampled requests are drawn from the proposal, and
                not tested unless they are verified.
        """
        self.options = options
        self.budget = ExplorationBudget(options)
        self.num_probes = 0
        self._margin = margin
        self.can_compare = compares_drafts
        """Whether that goes for the batch of the last search."""
        self._compares_drafts = compares_drafts
        self.is_far = False
        """Nothing is nearly as good as the plan, even with luck."""
        self._draws_drafts = draws_drafts
        self._next: Probe | None = None
        """What would be tried next."""
        self._usual_price = 0.0
        """Of that when it was found; asked for anew when it begins."""
        self._current: Probe | None = None
        self._steps_left = 0
        self._tried_off = False
        """The last probe was of K = 0."""
        self._steps_since_cheap = 0
        """Since there was little to catch up on, while drafting is off."""

    def may_draft_while_off(self, now: Situation) -> bool:
        """Whether the next step may be one of a probe. Asked once a step."""
        if self._steps_left > 0:
            return True
        is_cheap = now.catch_up_s <= _CHEAP_CATCH_UP_STEPS * now.plan.seconds
        self._steps_since_cheap = 0 if is_cheap else self._steps_since_cheap + 1
        if self._next is None or not self.budget.can_pay(self._usual_price):
            return False
        if 0 < self._steps_since_cheap <= _WAITS_STEPS and not self.budget.is_urgent:
            return False
        # More waits to be caught up on than when it was found.
        self._usual_price = self._price(self._next, now)
        return self.budget.can_pay(self._usual_price)

    def rest_steps(self) -> int:
        """Steps, while drafting is off, in which surely no probe begins."""
        if self._steps_left > 0:
            return 0
        if self._next is None:
            return _UNTIL_THE_NEXT_SEARCH
        return self.budget.steps_until_affordable(self._usual_price)

    def rested(self, num_steps: int) -> None:
        """So many of them were not asked about: as long as before is what waits."""
        if self._steps_since_cheap > 0:
            self._steps_since_cheap += num_steps

    def step(self, now: Situation) -> Probe | None:
        """What this step tries; None for the plan in use."""
        if self._next is not None and self._steps_left == 0:
            self._begin(self._next, now)
        if self._steps_left == 0:
            return None
        self._steps_left -= 1
        return self._current

    @property
    def _is_in_trial(self) -> bool:
        current = self._current
        return current is not None and 0 < self._steps_left < current.num_steps

    @property
    def has_next(self) -> bool:
        """There is something to try."""
        return self._next is not None

    @property
    def is_over(self) -> bool:
        """No further step of the probe follows."""
        return self._steps_left == 0

    def stop(self) -> None:
        """The batch is another one: what is under way was not meant for it."""
        self._steps_left = 0

    def _begin(self, probe: Probe, now: Situation) -> None:
        is_pressing = self._is_pressing(probe, now)
        if not self.budget.pay(self._price(probe, now), is_pressing):
            return
        self._steps_left = probe.num_steps
        if not now.is_off and not self.budget.is_granted:
            self.budget.be_patient()
        self.num_probes += 1
        self._current, self._next = probe, None
        self._tried_off = probe.plan.depth == 0

    def _is_pressing(self, probe: Probe, now: Situation) -> bool:
        """Whether it shows what not drafting takes, which is not known well enough."""
        if now.is_off or probe.plan.depth:
            return False
        doubt = now.times.uniform(0, 0).deviation
        luck = 1.0 + _DOUBTS_OF_OFF * doubt
        return doubt > _UNSURE_OF_OFF and (
            probe.is_close_off or probe.plan.goodput * luck >= now.plan.goodput
        )

    # -- while drafting is off ----------------------------------------------------

    def sample(self, now: Situation) -> set[str]:
        """Requests that get a draft in a probe from K = 0.

        Each time others, those with the least to catch up on.
        """
        requests, size = now.requests, self._sample_size(now)
        first = (self.num_probes * size) % len(requests)
        others_first = (*requests[first:], *requests[:first])
        chosen = sorted(others_first, key=lambda r: r.num_pending_tokens)[:size]
        return {request.request_id for request in chosen}

    def _sample_size(self, now: Situation) -> int:
        num_requests = len(now.requests)
        if self.budget.is_granted or not now.may_mix:
            return num_requests
        return min(self.options.sample_requests, num_requests)

    # -- prices -------------------------------------------------------------------

    def _price(self, probe: Probe, now: Situation) -> float:
        """Time lost by a probe, in steps of the best plan."""
        if now.is_off and probe.num_steps > 1:
            return self._price_of_trial(probe, now)
        if probe.compares:
            return self._price_of_comparing(probe.plan, now)
        # While drafting, the first step of a probe verifies what was drafted before.
        num_alike = max(probe.num_steps - 1, 1)
        price = num_alike * self._price_of_verifying(probe.plan, now)
        if probe.plan.depth == 0:  # and then drafting goes on
            num_unseen = probe.num_steps * len(now.requests)
            price += num_unseen * now.catch_up_token_s / now.plan.seconds
        return price

    def _price_of_trial(self, probe: Probe, now: Situation) -> float:
        lost = 1.0 - probe.plan.goodput / now.plan.goodput
        beginning = self._price_of_comparing(probe.plan, now)
        return max(probe.num_steps * lost, 0.0) + beginning

    def _price_of_comparing(self, plan: Plan, now: Situation) -> float:
        drafting_s = now.times.uniform(0, plan.depth).seconds - now.plan.seconds
        lost_s = drafting_s + now.catch_up_s
        return max(lost_s, 0.0) / now.plan.seconds

    def _price_of_verifying(self, plan: Plan, now: Situation) -> float:
        if now.is_off:
            # Drafting and verifying, one step after the other.
            off_s = now.plan.seconds
            num_requests = max(len(now.requests), 1)
            share = self._sample_size(now) / num_requests if now.requests else 1.0
            drafting_s = now.times.uniform(0, plan.depth).seconds - off_s
            verifying = now.times.undrafted(share * plan.depth, share == 1.0)
            lost_s = max(drafting_s, 0.0) + max(verifying.seconds - off_s, 0.0)
            # What is accepted is no loss.
            lost_s -= share * (plan.tokens / num_requests - 1.0) * off_s
            lost_s += now.catch_up_s
        else:
            lost_s = plan.seconds - plan.tokens / now.plan.goodput
        return max(lost_s, 0.0) / now.plan.seconds

    # -- finding ------------------------------------------------------------------

    def look_for(
        self, found: Sequence[Plan], now: Situation, by_rule: Sequence[Plan] = ()
    ) -> None:
        """Choose what to try next among the plans of a search.

        Args:
            found: Plans that say who gets how many draft tokens.
            now: What a probe is measured against.
            by_rule: Plans that leave this to a rule, for trials.
        """
        self.can_compare = self._compares_drafts and not (
            self._draws_drafts and any(not r.is_greedy for r in now.requests)
        )
        hopes = (p.optimistic_goodput for p in (*found, *by_rule) if p.depth)
        is_far = max(hopes, default=0.0) < _FAR * now.plan.goodput
        # Of a single request a look shows so little that it takes many.
        self.is_far = is_far and len(now.requests) > 1
        if now.is_off and self._is_in_trial:
            drafting = max(
                (p.goodput for p in (*found, *by_rule) if p.depth), default=0
            )
            if drafting < _TRIAL_FAILED * now.plan.goodput:
                self._steps_left = 0
        self._next = self._worth_a_try(found, now, by_rule)
        self._usual_price = self._price(self._next, now) if self._next else 0.0

    def look_for_nothing(self) -> None:
        """There is nobody to try anything with."""
        self._next = None

    def _worth_a_try(
        self, found: Sequence[Plan], now: Situation, by_rule: Sequence[Plan]
    ) -> Probe | None:
        """What may well beat the plan, cheapest for what it promises."""
        slowest = now.plan.seconds * self.options.max_slowdown
        others = [
            p
            for p in found
            if p.seconds <= slowest
            # A rule verifies the same whatever the plan says.
            and (
                p.depth != now.plan.depth
                or (not by_rule and p.is_uniform != now.plan.is_uniform)
            )
            and (p.depth or not self._has_just_tried_off)
        ]
        trial = self._trial(others, now, by_rule)
        if trial is not None:
            return trial
        hopeful = [p for p in others if self._promise(p, now) > 0.0]
        if now.is_off and self.can_compare:
            # What may be better if more is accepted is compared first, even after a
            # surprise: more looks for the same price. What would be better if only it
            # were faster must be run.
            needed = now.plan.goodput * (1 + self._margin)
            hopeful = [p for p in hopeful if p.bold_goodput > needed]
        if not hopeful and now.is_off:
            # However hopeless: without drafts nobody would notice that it changed.
            return self._look(others, now)
        off = self._off_worth_a_try(others, now)
        # Two in a row, where neither the step before nor the one after is like it, so
        # that one step both drafts and verifies as the probe says.
        num_steps = 1 if now.is_off else 2
        if off is not None and not (hopeful and self._tried_off):
            if off.goodput >= _OFF_CLOSE * now.plan.goodput:
                return Probe(off, num_steps=_OFF_TRIAL_STEPS, is_close_off=True)
            return Probe(off, num_steps=num_steps)
        if not hopeful:
            return None
        best = max(hopeful, key=lambda p: self._promise_for_price(p, now))
        return Probe(best, num_steps=num_steps)

    @property
    def _has_just_tried_off(self) -> bool:
        return self._tried_off and self.budget.steps_since_probe < _OFF_AGAIN_STEPS

    def _trial(
        self, others: Sequence[Plan], now: Situation, by_rule: Sequence[Plan]
    ) -> Probe | None:
        """Drafting for a while, if it may be about as good as not to."""
        look = self._look(others, now) if now.is_off else None
        if look is None:
            return None
        price = min(_TRIAL_STEP_PRICE * self._price(look, now), _MAX_TRIAL_STEP_PRICE)
        least = now.plan.goodput * (1 - price)
        drafting = [p for p in others if p.depth and p.is_uniform] + [*by_rule]
        good = [p for p in drafting if p.goodput >= least]
        # The shortest: later positions are what is known least of.
        chosen = min(good, key=lambda p: (p.depth, -p.goodput), default=None)
        is_alone = len(now.requests) == 1
        num_steps = _TRIAL_STEPS if is_alone else _TRIAL_STEPS_OF_SEVERAL
        return chosen and Probe(chosen, num_steps=num_steps)

    def _look(self, others: Sequence[Plan], now: Situation) -> Probe | None:
        """The cheapest way to see from K = 0 whether anything is accepted."""
        probes = [Probe(plan, self.can_compare) for plan in others]
        return min(probes, key=lambda probe: self._price(probe, now), default=None)

    def _off_worth_a_try(self, others: Sequence[Plan], now: Situation) -> Plan | None:
        """K = 0, before other depths: it comes before being faster still."""
        off = next((p for p in others if p.depth == 0), None)
        if off is None or now.is_off:
            return None
        is_close = off.goodput >= _OFF_NEARLY_AS_GOOD * now.plan.goodput
        if now.times.guesses_plain:
            luck = _DEVIATIONS_OF_A_GUESS * now.times.uniform(0, 0).deviation
            is_close |= off.goodput * (1.0 + luck) >= now.plan.goodput
        return off if is_close or self._promise(off, now) > 0.0 else None

    def _promise(self, plan: Plan, now: Situation) -> float:
        """Gain beyond what would change the decision, with luck; see `preferred`."""
        needed = 1 + self._margin if plan.depth else 1 / (1 + DRAFTING_PREMIUM)
        return plan.optimistic_goodput / (now.plan.goodput * needed) - 1.0

    def _promise_for_price(self, plan: Plan, now: Situation) -> tuple[float, float]:
        price = self._price_of_verifying(plan, now)
        return self._promise(plan, now) / (price + 0.02), -plan.depth
