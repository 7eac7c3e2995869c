"""What is run to learn, and the one cap on what that may cost.

Exploration is Thompson sampling (Thompson, Biometrika 25, 1933): one seeded sample of
what is believed of acceptance and cost; if another depth is best in the sample, it is
run for a few steps. A depth is tried as often as it may well be the best. While
drafting is disabled, shadow drafts see beside that whether anything would be accepted.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from vllm_mtp.control.kv_backfill import most_caught_up_now
from vllm_mtp.control.planner import Group, Plan
from vllm_mtp.control.step_times import Times
from vllm_mtp.records import DecodeRequest

EXPLORED_SHARE = 0.01
"""Of the time, that exploration may cost: half of what the promise of 0.98 leaves."""
MAX_SAVED_STEPS = 4.0
"""Most that is saved up, in steps, and what there is at the start: a step each of a few
depths. Of a run of 400 steps it is a hundredth."""
EXPLORATION_STEPS = 3
"""Steps of an exploration: a draft is verified in the step after it, whose outcome is
known another step later under async scheduling."""
SHADOW_PERIOD_STEPS = 24
"""Steps between two shadow drafts while drafting is disabled. Tuning worlds: half and
twice as many make no difference beyond the interval."""
SHADOW_REQUESTS = 8
"""Requests of a shadow draft that is verified: enough to tell 0.1 from 0.5."""


class ExplorationCap:
    """Time that may be spent on exploration, saved up as a share of all time."""

    def __init__(self) -> None:
        """Begin with what can be saved."""
        self.spent_s = 0.0
        """In all."""
        self._saved_steps = MAX_SAVED_STEPS

    def earn(self, seconds: float, step_s: float) -> None:
        """Time has passed.

        Args:
            seconds: So much.
            step_s: Of a usual step.
        """
        saved = self._saved_steps + EXPLORED_SHARE * seconds / step_s
        self._saved_steps = min(saved, MAX_SAVED_STEPS)

    def pay(self, price_s: float, step_s: float) -> bool:
        """Take a price if it can be paid.

        Args:
            price_s: Seconds that are expected to be lost.
            step_s: Of a usual step.
        """
        price_steps = price_s / step_s
        if price_steps > self._saved_steps:
            return False
        self.spent_s += price_s
        self._saved_steps -= price_steps
        return True


class Exploration:
    """Steps of another plan, under way."""

    def __init__(self, plan: Plan, num_steps: int, is_shadow: bool = False) -> None:
        """Begin.

        Args:
            plan: That is run.
            num_steps: So many steps, > 0.
            is_shadow: Its drafts need not be verified.
        """
        self.plan, self.is_shadow = plan, is_shadow
        self.steps_left = num_steps


class Situation(NamedTuple):
    """What a price is worked out from."""

    plan: Plan
    """The best one known."""
    times: Times
    requests: Sequence[DecodeRequest]
    backfill_token_s: float

    @property
    def backfill_s(self) -> float:
        """Time of the KV backfill in the first step that drafts again."""
        pending = [request.num_pending_tokens for request in self.requests] or [0]
        return most_caught_up_now(pending) * self.backfill_token_s

    def price_s(self, other: Plan, switch_steps: float) -> float:
        """Time that an exploration is expected to lose.

        Args:
            other: The plan that is explored.
            switch_steps: What any change of depth costs.
        """
        lost_s = other.seconds - other.tokens / self.plan.goodput
        price_s = EXPLORATION_STEPS * max(lost_s, 0.0)
        price_s += switch_steps * self.plan.seconds
        if not self.plan.depth:
            price_s += self.backfill_s
        elif not other.depth:  # and then drafting goes on
            pending = EXPLORATION_STEPS * len(self.requests)
            price_s += pending * self.backfill_token_s
        return price_s

    def shadow_price_s(self, draft: Plan, verified: Collection[str]) -> float:
        """Time that a shadow draft is expected to lose.

        Args:
            draft: Uniform plan of its depth.
            verified: Requests whose draft is verified.
        """
        times, off_s = self.times, self.times.seconds(0.0, 0)
        price_s = times.seconds(0.0, draft.depth) - off_s + self.backfill_s
        if verified:
            share = len(verified) / len(self.requests)
            rows = share * draft.depth
            price_s += times.seconds(rows, 0, share == 1.0) - off_s
            gained = draft.tokens / len(self.requests) - 1.0
            price_s -= share * gained * off_s
        return max(price_s, 0.0)


def shadow_sample(requests: Sequence[DecodeRequest], may_mix: bool) -> Collection[str]:
    """Requests whose shadow draft is verified: those with the least KV backfill.

    Args:
        requests: The batch.
        may_mix: They may have unequal draft lengths.
    """
    if may_mix:
        by_pending = sorted(requests, key=lambda request: request.num_pending_tokens)
        requests = by_pending[:SHADOW_REQUESTS]
    return {request.request_id for request in requests}


def sampled_goodput(
    plan: Plan,
    groups: Sequence[Group],
    sampled: Sequence[Sequence[float]],
    times: Times,
) -> float:
    """What a plan is worth in a sample of the posteriors.

    Args:
        plan: Found for these groups by what is expected.
        groups: All requests.
        sampled: Survival of each group in the sample.
        times: Step times in the sample.
    """
    tokens = rows = num_requests = 0.0
    is_uniform = plan.is_uniform
    for group, survival in zip(groups, sampled, strict=True):
        pin = group.pinned
        length = plan.draft_length(group.survival) if pin is None else pin
        is_uniform = is_uniform and length == plan.depth
        number = plan.copy_length(length, group) - length
        copied = group.continued(length)[:number]
        tokens += group.num_requests * (1.0 + sum(survival[:length]) + sum(copied))
        rows += group.num_requests * (length + len(copied))
        num_requests += group.num_requests
    return tokens / times.seconds(rows / num_requests, plan.depth, is_uniform)
