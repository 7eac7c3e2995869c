"""The best decision for a batch: draft depth and who gets how many draft tokens.

Requests enter as groups of one survival class. A *uniform* plan gives every request
``depth`` draft tokens. A *mixed* one gives out the draft tokens of all requests in
order of falling survival, down to a cut: for any number of rows that is the most
acceptance these rows can bring (survival falls with the position, so the prefix order
within a request holds by itself). A plan's worth is its expected goodput: expected
committed tokens over the expected time of drafting ``depth`` deep and verifying its
rows. No shape of the cost is assumed.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain
from operator import attrgetter
from typing import NamedTuple

from benchmarks.control.previous.expected_times import ExpectedTimes

_MAX_BOLDNESS = 0.6
"""Most by which optimism may shorten an expected time, as a fraction."""
_NUM_MIXED_DEPTHS = 3
_ABOVE_ANY_SURVIVAL = 2.0
_goodput = attrgetter("goodput")


class Group(NamedTuple):
    """Requests of one survival class whose draft length is free."""

    num_requests: int
    # [K_max] survival probabilities, and the same as high as they may well be
    survival: Sequence[float]
    optimistic: Sequence[float]
    offsets: Sequence[float] = ()
    """What the confidence of a draft token may say of its log-odds, equally likely
    values; see `selective`."""


class PinnedGroup(NamedTuple):
    """Requests of one class whose users fixed the draft length."""

    num_requests: int
    draft_length: int
    survival: Sequence[float]


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
    optimistic_goodput: float
    """Tokens per second if acceptance and cost are as good as they may well be."""
    worst_acceptance_length: float = 1.0
    """Expected acceptance length of the request that gets least from the plan."""
    bold_s: float = 1.0
    """Step time if cost is as good as it may well be."""

    @property
    def is_uniform(self) -> bool:
        return self.cut == 0.0

    @property
    def goodput(self) -> float:
        """Expected committed tokens per second."""
        return self.tokens / self.seconds

    @property
    def bold_goodput(self) -> float:
        """Tokens per second if cost alone is as good as it may well be."""
        return self.tokens / self.bold_s

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


class Batch(NamedTuple):
    """What a plan is made for."""

    groups: Sequence[Group]
    pinned: Sequence[PinnedGroup] = ()

    @property
    def num_requests(self) -> int:
        free = sum(g.num_requests for g in self.groups)
        return free + sum(g.num_requests for g in self.pinned)


class _Base(NamedTuple):
    """What pinned requests bring to every plan."""

    num_requests: int
    num_free: int
    num_draft_tokens: int
    tokens: float
    """Committed: one of every request, and the pinned ones' drafts."""
    pins: frozenset[int]
    worst: float


def plans(
    batch: Batch,
    times: ExpectedTimes,
    depths: Sequence[int],
    optimism: float = 0.0,
    keep: Sequence[int] = (),
    may_mix: bool = True,
) -> list[Plan]:
    """Plans worth a look: a uniform one for each depth, mixed ones where they may pay.

    Args:
        batch: Groups of requests, at least one request.
        times: Expected step times for it.
        depths: Allowed draft depths, rising. Where 0 is not allowed, mixed plans may
            verify nothing.
        optimism: Deviations of cost that ``optimistic_goodput`` allows for.
        keep: Depths whose mixed plans are wanted, however they compare.
        may_mix: Whether there are mixed plans at all, where not all depths draft.
    """
    base = _base(batch)
    deepest_pin = max(base.pins, default=0)
    allowed = [d for d in depths if d >= deepest_pin] or [deepest_pin]
    uniform = [_uniform(d, batch, base, times, optimism) for d in allowed]
    if (len(batch.groups) < 2 or not may_mix) and 0 in depths:
        return uniform
    ranked = sorted(uniform, key=lambda plan: -plan.optimistic_goodput)
    wanted = {plan.depth for plan in ranked[:_NUM_MIXED_DEPTHS]} | set(keep)
    mixed: dict[int, Plan] = {}
    waiting = sorted(wanted & set(allowed) - {0})
    while waiting:
        for depth in waiting:
            found = _mixed(depth, batch, base, times, optimism, 0 not in depths)
            if found is not None:
                mixed[depth] = found
        # Drafting deeper for a few may pay where drafting deeper for all does not.
        best = max(chain(uniform, mixed.values()), key=_goodput)
        above = len(allowed) if best.is_uniform else bisect_right(allowed, best.depth)
        waiting = [d for d in allowed[above : above + 1] if d not in mixed]
    return uniform + [mixed[depth] for depth in sorted(mixed)]


def _base(batch: Batch) -> _Base:
    lengths = [1.0 + sum(p.survival[: p.draft_length]) for p in batch.pinned]
    num_free = sum(group.num_requests for group in batch.groups)
    counts = [p.num_requests for p in batch.pinned]
    return _Base(
        num_free + sum(counts),
        num_free,
        sum(p.num_requests * p.draft_length for p in batch.pinned),
        num_free + sum(n * a for n, a in zip(counts, lengths, strict=True)),
        frozenset(p.draft_length for p in batch.pinned),
        min(lengths, default=float("inf")),
    )


def _uniform(
    depth: int, batch: Batch, base: _Base, times: ExpectedTimes, optimism: float
) -> Plan:
    tokens = optimistic = base.tokens
    worst = base.worst
    for group in batch.groups:
        survived = sum(group.survival[:depth])
        tokens += group.num_requests * survived
        optimistic += group.num_requests * sum(group.optimistic[:depth])
        worst = min(worst, 1.0 + survived)
    if base.pins <= {depth}:
        seconds, doubt = times.uniform(depth, depth)
    else:
        num_draft_tokens = base.num_draft_tokens + depth * base.num_free
        seconds, doubt = times.mixed(num_draft_tokens / base.num_requests, depth)
    bold_s = seconds * (1.0 - min(optimism * doubt, _MAX_BOLDNESS))
    return Plan(depth, 0.0, tokens, seconds, optimistic / bold_s, worst, bold_s)


def _mixed(
    depth: int,
    batch: Batch,
    base: _Base,
    times: ExpectedTimes,
    optimism: float,
    may_verify_nothing: bool,
) -> Plan | None:
    """The best cut."""
    marginals = sorted(
        (
            (survival, group.num_requests, optimistic)
            for group in batch.groups
            for survival, optimistic in zip(
                group.survival[:depth], group.optimistic[:depth], strict=True
            )
        ),
        reverse=True,
    )
    curve = times.mixed_curve(depth)
    rows = [base.num_draft_tokens, *(n for _, n, _ in marginals)]
    tokens = [base.tokens, *(s * n for s, n, _ in marginals)]
    halves = [2.0 * r / base.num_requests for r in accumulate(rows)]
    goodputs = [
        t / _interpolated(curve, h)
        for t, h in zip(accumulate(tokens), halves, strict=True)
    ]
    # The last cut serves everybody: that is the uniform plan.
    first = 0 if may_verify_nothing else 1
    best = max(range(first, len(goodputs) - 1), key=goodputs.__getitem__, default=-1)
    if best < 0:
        return None
    cut = marginals[best - 1][0] if best else _ABOVE_ANY_SURVIVAL
    lucky = base.tokens + sum(o * n for _, n, o in marginals[:best])
    seconds, doubt = times.mixed(halves[best] / 2, depth)
    bold_s = seconds * (1.0 - min(optimism * doubt, _MAX_BOLDNESS))
    worst = base.worst
    for group in batch.groups:
        served = sum(s for s in group.survival[:depth] if s >= cut)
        worst = min(worst, 1.0 + served)
    tokens_there = goodputs[best] * seconds
    return Plan(depth, cut, tokens_there, seconds, lucky / bold_s, worst, bold_s)


def _interpolated(curve: Sequence[float], halves: float) -> float:
    lower = min(int(halves), len(curve) - 2)
    share = halves - lower
    return curve[lower] + share * (curve[lower + 1] - curve[lower])
