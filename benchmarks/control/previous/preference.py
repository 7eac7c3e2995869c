"""Which of the plans that were found is used: the best, unless the one in use will do.

The best of many estimates is mostly the luckiest, so another plan must promise more
than a little, or decisions would thrash.
"""

from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from benchmarks.control.previous.batch_kind import request_bucket
from benchmarks.control.previous.planner import Plan

DRAFTING_PREMIUM = 0.02
"""Gain over not drafting below which drafting stops: not drafting needs no luck with
acceptance, and where both promise the same, the estimates of drafting were the lucky
ones (on texts where K = 0 and K = 1 were equal, what was drafted lost 2 to 4 %)."""
_AS_GOOD = 0.98
"""Of the best goodput: no difference that estimates would show."""
_PATIENCE_STEPS = 2.0
"""Time that drafting may lose before it is left: about what looks and trials cost by
which it is found again."""
_RESUME_HORIZON_STEPS = 64
"""Steps within which drafting must earn back what catching up costs."""

_RELUCTANCE_HALF_LIFE_STEPS = 512
_MAX_RELUCTANCE = 3.0
"""A change of the load that drafting pays for promises more than four margins."""

_goodput = attrgetter("goodput")


class Reluctance:
    """To resume drafting: it grows each time and fades when that does not last.

    Where drafting and not drafting are worth the same, which of them seems better
    depends on the last few texts, and every change costs a catch-up and new probes.
    Seen to change every 30 steps, which lost 4 %.
    """

    def __init__(self) -> None:
        self.num_resumed = 0.0
        """Recent ones count most."""

    def pass_steps(self, num_steps: int) -> None:
        """So many steps have passed."""
        self.num_resumed *= 0.5 ** (num_steps / _RELUCTANCE_HALF_LIFE_STEPS)

    def resumed(self) -> None:
        """Drafting goes on after a pause."""
        self.num_resumed += 1.0

    def margin(self, margin: float) -> float:
        """What resuming must promise.

        Args:
            margin: The same if it had never been resumed.
        """
        return margin * (1.0 + min(self.num_resumed, _MAX_RELUCTANCE))


class BatchTraits(NamedTuple):
    """What is known of a batch before anything is drafted for it."""

    size: int
    """Bucket of its requests."""
    is_greedy: bool
    """None of its requests is sampled."""
    constrained: frozenset[bool]
    """Whether its requests are constrained; both if only some are."""

    @classmethod
    def of(
        cls, are_greedy: Collection[bool], are_constrained: Iterable[bool]
    ) -> "BatchTraits":
        """Of these requests, at least one."""
        return cls(
            request_bucket(len(are_greedy)), all(are_greedy), frozenset(are_constrained)
        )


class Habit:
    """What was decided last for batches of one kind.

    In a batch that ends, a single request is left for a few steps, and drafting for one
    pays where for several it does not: neither the change nor the way back says
    anything about what is accepted. Nor does it where code is followed by JSON: with
    one habit for both, each of them began as the other had ended, and where that went
    back and forth every 32 steps, a fifth of those with JSON had drafts for nothing.
    """

    __slots__ = ("lost_steps", "plan", "reluctance")

    def __init__(self, plan: Plan | None) -> None:
        """Begin as for batches of another kind.

        Args:
            plan: In use for those; None at the very start.
        """
        self.plan = plan
        self.reluctance = Reluctance()
        self.lost_steps = 0.0
        """By drafting, since it was last thought to pay."""

    def drafted(self, found: Sequence[Plan], num_steps: int) -> None:
        """Note what drafting has lost or gained.

        Args:
            found: Plans of a search.
            num_steps: Steps since the search before, which drafted.
        """
        drafting = max((p.goodput for p in found if p.depth), default=0.0)
        off = max((p.goodput for p in found if not p.depth), default=0.0)
        if drafting and off:
            lost = num_steps * (1.0 - drafting / (off * (1 + DRAFTING_PREMIUM)))
            self.lost_steps = max(self.lost_steps + lost, 0.0)

    def resumed(self) -> None:
        """Drafting goes on after a pause."""
        self.reluctance.resumed()
        self.lost_steps = 0.0

    @property
    def is_patient(self) -> bool:
        """Whether to go on drafting although not to seems better.

        Like renting skis: to leave costs what it takes to find the way back, so
        drafting goes on until it has lost that much. Texts that change between easy
        and hard within a few dozens of tokens are drafted throughout.
        """
        return self.lost_steps < _PATIENCE_STEPS / (1.0 + self.reluctance.num_resumed)


def feasible(found: Sequence[Plan], max_token_latency_s: float | None) -> list[Plan]:
    """Plans under which no request waits longer for a token; at least the best."""
    if max_token_latency_s is None:
        return list(found)
    return [p for p in found if p.worst_token_latency_s <= max_token_latency_s] or [
        min(found, key=lambda plan: plan.worst_token_latency_s)
    ]


def preferred(
    found: Sequence[Plan],
    current: Plan,
    margin: float,
    catch_up_s: float,
    is_patient: bool = False,
) -> Plan:
    """The best plan of the kind in use, unless another kind is clearly better.

    Args:
        found: Plans for the batch as it is now.
        current: The one in use.
        margin: Gain that another depth must promise.
        catch_up_s: What drafting costs at first; 0 where it goes on.
        is_patient: Go on drafting for now, even if not to draft seems better.
    """
    if is_patient and current.depth:
        found = [p for p in found if p.depth] or found
    best = max(found, key=_goodput)
    same = [
        p
        for p in found
        if p.depth == current.depth and p.is_uniform == current.is_uniform
    ] or [p for p in found if p.depth == current.depth]
    if not same:
        return best
    kept = max(same, key=_goodput)
    catching_up = catch_up_s / kept.seconds / _RESUME_HORIZON_STEPS
    is_better = best.goodput / kept.goodput - 1.0 - catching_up > margin
    chosen = best if is_better else kept
    off = max((p for p in found if p.depth == 0), default=chosen, key=_goodput)
    return off if off.goodput * (1 + DRAFTING_PREMIUM) > chosen.goodput else chosen


def best_of_each_depth(found: Sequence[Plan]) -> list[Plan]:
    """Where drafts are verified by a rule, in whatever way was planned."""
    best = {plan.depth: plan for plan in sorted(found, key=_goodput)}
    return list(best.values())


def usual_depth(found: Sequence[Plan]) -> int:
    """The best draft length above 0 if all requests had the same; 0 if there is none.

    The shortest of those that are as good: what drafts cost is surer than what they
    bring.
    """
    drafting = [p for p in found if p.depth and p.is_uniform]
    enough = _AS_GOOD * max(map(_goodput, drafting), default=0.0)
    return min((p.depth for p in drafting if p.goodput >= enough), default=0)
