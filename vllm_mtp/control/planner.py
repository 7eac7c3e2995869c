"""The best decision for a batch: draft depth, and who gets how many draft tokens.

Requests enter as groups of one class. A *uniform* plan gives every request ``depth``
draft tokens. A *mixed* one gives out the draft tokens of all requests in order of
falling survival, down to a cut: for any number of rows that is the most acceptance they
can bring. A plan is worth its goodput: expected committed tokens over the expected time
of drafting ``depth`` deep and verifying its rows. No shape of the cost is assumed.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from vllm_mtp.control.step_times import Times


class Group(NamedTuple):
    """Requests of one class."""

    num_requests: int
    # [K_max]
    survival: Sequence[float]
    pinned: int | None = None
    """Draft length that their users fixed."""
    offsets: Sequence[float] = ()
    """What the confidence of a draft token may say of its log-odds, equally likely
    values; see `selective`."""
    first_log_odds: float = 0.0
    """Of the first draft token, at usual confidence."""
    # [K_max]
    copied: Sequence[float] = ()
    """Survival of what contexts offer: of the draft that they agree with, as a whole,
    and of each token after it. Empty where none do."""

    def continued(self, length: int) -> Sequence[float]:
        """Survival of the tokens that may be copied after ``length`` draft tokens."""
        room = len(self.survival) - length
        return self.copied[1 : 1 + room] if length else ()


class Plan(NamedTuple):
    """A decision for any batch like the one it was made for."""

    depth: int
    cut: float
    """A request gets draft tokens as long as they survive with at least this; 0 for
    ``depth`` tokens for every request that is not pinned."""
    tokens: float
    """Expected committed tokens of the step."""
    seconds: float
    """Expected step time."""
    worst_acceptance_length: float
    """Expected acceptance length of the request that gets least from the plan."""
    copy_cut: float = math.inf
    """A draft is continued from the context as long as tokens survive with this."""

    @property
    def is_uniform(self) -> bool:
        return self.cut == 0.0

    @property
    def goodput(self) -> float:
        """Expected committed tokens per second."""
        return self.tokens / self.seconds

    @property
    def worst_token_latency_s(self) -> float:
        """Longest that any request is expected to wait for a token."""
        return self.seconds / self.worst_acceptance_length

    def draft_length(self, survival: Sequence[float]) -> int:
        """K of a request that is not pinned."""
        if self.is_uniform:
            return self.depth
        for length, probability in enumerate(survival[: self.depth]):
            if probability < self.cut:
                return length
        return self.depth

    def copy_length(self, length: int, group: Group) -> int:
        """Draft length where a draft of ``length`` is continued from the context."""
        for survival in group.continued(length):
            if survival < self.copy_cut:
                break
            length += 1
        return length


goodput = attrgetter("goodput")


class _Pins(NamedTuple):
    """What pinned requests bring to every plan."""

    num_requests: int
    """All of the batch."""
    num_draft_tokens: int
    tokens: float
    """Committed: one of every request, and the pinned ones' drafts."""
    lengths: frozenset[int]
    worst: float


def _pins(groups: Sequence[Group]) -> _Pins:
    pinned = [(g, g.pinned) for g in groups if g.pinned is not None]
    lengths = [1.0 + sum(g.survival[:k]) for g, k in pinned]
    num_requests = sum(g.num_requests for g in groups)
    return _Pins(
        num_requests,
        sum(g.num_requests * k for g, k in pinned),
        num_requests
        + sum(
            g.num_requests * (a - 1.0)
            for (g, _), a in zip(pinned, lengths, strict=True)
        ),
        frozenset(k for _, k in pinned),
        min(lengths, default=float("inf")),
    )


def plans(
    groups: Sequence[Group],
    times: Times,
    depths: Sequence[int],
    may_mix: bool = True,
) -> list[Plan]:
    """The best plan of each depth.

    Args:
        groups: At least one request.
        times: Of steps of this batch.
        depths: Allowed draft depths, rising. Where 0 is not allowed, mixed plans may
            verify nothing.
        may_mix: Whether there are mixed plans where not all depths draft.
    """
    pins = _pins(groups)
    free = [group for group in groups if group.pinned is None]
    deepest_pin = max(pins.lengths, default=0)
    allowed = [d for d in depths if d >= deepest_pin] or [deepest_pin]
    found = [_uniform(d, free, pins, times) for d in allowed]
    if (len(free) > 1 and may_mix) or 0 not in depths:
        may_be_empty = 0 not in depths
        found = improved(
            found,
            groups,
            times,
            lambda plan: _mixed(plan, free, pins, times, may_be_empty),
        )
    return found


def improved(
    found: Sequence[Plan],
    groups: Sequence[Group],
    times: Times,
    improve: Callable[[Plan], Plan],
) -> list[Plan]:
    """Plans, or better ones that choose what to verify.

    Those bring no more tokens than all that are drafted. So of many depths most are
    hopeless, where drafting does not pay nearly all.
    """
    best = max(plan.goodput for plan in found)

    def is_promising(plan: Plan) -> bool:
        most = sum(n * (1.0 + sum(s[: plan.depth])) for n, s, *_ in groups)
        return most >= best * times.least_seconds(plan.depth)

    return [
        max(plan, improve(plan), key=goodput) if is_promising(plan) else plan
        for plan in found
    ]


def _uniform(depth: int, free: Sequence[Group], pins: _Pins, times: Times) -> Plan:
    tokens, rows, worst = pins.tokens, pins.num_draft_tokens, pins.worst
    for group in free:
        survived = sum(group.survival[:depth])
        tokens += group.num_requests * survived
        rows += group.num_requests * depth
        worst = min(worst, 1.0 + survived)
    is_uniform = pins.lengths <= {depth}
    seconds = times.seconds(rows / pins.num_requests, depth, is_uniform)
    return Plan(depth, 0.0, tokens, seconds, worst)


def _mixed(
    uniform: Plan,
    free: Sequence[Group],
    pins: _Pins,
    times: Times,
    may_verify_nothing: bool,
) -> Plan:
    """The best cut at the depth of a uniform plan; that plan if there is none."""
    depth = uniform.depth
    marginals = sorted(
        ((s, g.num_requests) for g in free for s in g.survival[:depth]), reverse=True
    )
    rows = accumulate((pins.num_draft_tokens, *(n for _, n in marginals)))
    tokens = accumulate((pins.tokens, *(s * n for s, n in marginals)))
    worths = [
        (t / times.seconds(r / pins.num_requests, depth, is_uniform=False), t, i)
        for i, (t, r) in enumerate(zip(tokens, rows, strict=True))
    ]
    # The last cut serves everybody: that is the uniform plan.
    found = worths[0 if may_verify_nothing else 1 : -1]
    if not found:
        return uniform
    worth, committed, index = max(found)
    cut = marginals[index - 1][0] if index else math.inf
    worst = pins.worst
    for group in free:
        served = sum(s for s in group.survival[:depth] if s >= cut)
        worst = min(worst, 1.0 + served)
    return Plan(depth, cut, committed, committed / worth, worst)


def feasible(found: list[Plan], max_token_latency_s: float | None) -> list[Plan]:
    """Plans under which no request waits longer for a token; at least the best."""
    if max_token_latency_s is None:
        return found
    return [p for p in found if p.worst_token_latency_s <= max_token_latency_s] or [
        min(found, key=lambda plan: plan.worst_token_latency_s)
    ]
