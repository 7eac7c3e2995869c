"""The best decision for a batch: draft depth and who gets how many draft tokens.

Requests enter as groups of one survival class. For a depth d the draft tokens of all
requests, taken in order of falling survival, give for any number of rows the most
acceptance that these rows can bring (survival falls with the position, so the prefix
order within a request holds by itself). Along that curve the planner looks for the
largest expected goodput: expected committed tokens over the expected time of drafting
d deep and verifying those rows. No shape of the cost is assumed, every tier is tried.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from vllm_mtp.control.cost_block import Estimate, Place, uniform_tier


class Group(NamedTuple):
    """Requests of one survival class whose draft length is free."""

    class_id: int
    num_requests: int
    # [K_max] survival probabilities, and the same as high as they may well be
    survival: Sequence[float]
    optimistic: Sequence[float]


class PinnedGroup(NamedTuple):
    """Requests of one class whose users fixed the draft length."""

    num_requests: int
    draft_length: int
    survival: Sequence[float]


class Plan(NamedTuple):
    """A decision for any batch like the one it was made for."""

    depth: int
    cut: float
    """A request gets draft tokens as long as they survive with at least this."""
    is_uniform: bool
    """Every request that is not pinned gets ``depth``."""
    tokens: float
    """Expected committed tokens of the step."""
    seconds: float
    """Expected step time."""
    optimistic_goodput: float
    """Tokens per second if acceptance and cost are as good as they may well be."""
    last_class: int = -1
    """The class that is only partly served at the cut, -1 for none."""
    num_of_last_class: int = 0
    """Its requests that get the draft token at the cut; the others get one less."""

    @property
    def goodput(self) -> float:
        """Expected committed tokens per second."""
        return self.tokens / self.seconds

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
    pinned: Sequence[PinnedGroup]

    @property
    def num_requests(self) -> int:
        return sum(g.num_requests for g in (*self.groups, *self.pinned))


class _Marginal(NamedTuple):
    """One more draft token for every request of a group."""

    survival: float
    position: int
    num_requests: int
    optimistic: float
    class_id: int


def plans(
    batch: Batch,
    times: Mapping[Place, Estimate],
    max_draft_length: int,
    optimism: float = 0.0,
) -> Iterator[Plan]:
    """Every plan worth a look: for each depth, points along its curve.

    Args:
        batch: Groups of requests, at least one request.
        times: Expected time of every cell for this number of requests.
        max_draft_length: Upper bound on the depth.
        optimism: Deviations of cost that ``optimistic_goodput`` allows for.
    """
    marginals = sorted(
        _Marginal(
            survival, position, group.num_requests, optimistic, group.class_id
        )
        for group in batch.groups
        for position, (survival, optimistic) in enumerate(
            zip(group.survival, group.optimistic, strict=True), start=1
        )
    )
    marginals.reverse()
    deepest_pin = max((p.draft_length for p in batch.pinned), default=0)
    for depth in range(min(deepest_pin, max_draft_length), max_draft_length + 1):
        yield from _plans_at(depth, batch, marginals, times, optimism)


def _plans_at(
    depth: int,
    batch: Batch,
    marginals: Sequence[_Marginal],
    times: Mapping[Place, Estimate],
    optimism: float,
) -> Iterator[Plan]:
    num_requests = batch.num_requests
    tokens = float(num_requests)
    extra = 0
    for pinned in batch.pinned:
        extra += pinned.num_requests * pinned.draft_length
        tokens += pinned.num_requests * sum(pinned.survival[: pinned.draft_length])
    optimistic = tokens
    free = sum(group.num_requests for group in batch.groups)
    full = extra + depth * free
    spacing = max(num_requests // 8, 1)
    emitted = extra
    for marginal in marginals:
        if marginal.position > depth:
            continue
        served = 0
        while served < marginal.num_requests:
            piece = min(marginal.num_requests - served, spacing)
            served += piece
            extra += piece
            tokens += piece * marginal.survival
            optimistic += piece * marginal.optimistic
            if extra - emitted < spacing or extra == full:
                continue
            emitted = extra
            seconds, doubt = _mixed_time(times, depth, extra / num_requests)
            bold = optimistic / (seconds * (1.0 - min(optimism * doubt, 0.6)))
            yield Plan(
                depth,
                marginal.survival,
                False,
                tokens,
                seconds,
                bold,
                marginal.class_id,
                served,
            )
    is_uniform = all(p.draft_length == depth for p in batch.pinned)
    seconds, doubt = (
        times[uniform_tier(depth), depth]
        if is_uniform
        else _mixed_time(times, depth, full / num_requests)
    )
    bold = optimistic / (seconds * (1.0 - min(optimism * doubt, 0.6)))
    yield Plan(depth, 0.0, True, tokens, seconds, bold)


def _mixed_time(
    times: Mapping[Place, Estimate], depth: int, draft_tokens: float
) -> Estimate:
    """Between the centres of two tiers of unequal draft lengths."""
    halves = 2 * draft_tokens
    lower = min(int(halves), 2 * depth)
    low = times[2 * lower + 1, depth]
    if lower == 2 * depth:
        return low
    high = times[2 * lower + 3, depth]
    share = halves - lower
    return Estimate(
        low.seconds + share * (high.seconds - low.seconds),
        max(low.deviation, high.deviation),
    )
