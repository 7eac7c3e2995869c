"""A batch as plans see it: what kind it is, and requests of each class."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vllm_mtp.control.planner import Group
from vllm_mtp.control.step_times import request_bucket
from vllm_mtp.control.survival import SurvivalModel
from vllm_mtp.records import DecodeRequest, StepOutcome


class BatchKind(NamedTuple):
    """What is known of a batch before anything is drafted for it.

    Each kind keeps the plan that was found for it: a batch that shrinks to a single
    request for a few steps says nothing about the one before.
    """

    size: int
    """Bucket of its requests."""
    is_greedy: bool
    """None of its requests is sampled."""
    constrained: frozenset[bool]
    """Whether its requests are constrained; both if only some are."""
    is_copying: bool = False
    """Contexts continue some of its drafts."""


def kind_of(
    are_greedy: Sequence[bool],
    are_constrained: Sequence[bool],
    are_copying: Sequence[bool],
) -> BatchKind:
    """Of these requests, at least one."""
    size = request_bucket(len(are_greedy))
    constrained = frozenset(are_constrained)
    return BatchKind(size, all(are_greedy), constrained, any(are_copying))


def is_of_kind(outcome: StepOutcome, kind: BatchKind) -> bool:
    """Whether a step only decoded such a batch."""
    if outcome.num_prefill_tokens or not outcome.num_decode_requests:
        return False
    size = request_bucket(outcome.num_decode_requests)
    return (size, outcome.is_greedy) == kind[:2]


def grouped(
    requests: Sequence[DecodeRequest],
    survival: SurvivalModel,
    bounded: Callable[[int], int],
    may_split: bool,
) -> tuple[list[Group], list[int]]:
    """Sort requests into groups that plans do not tell apart.

    Args:
        requests: Those that decode. The model sees all of them, and forgets others
            where it knows far too many.
        survival: What is believed of acceptance.
        bounded: The draft length that a pinned one becomes.
        may_split: Drafts of a class may differ by confidence.

    Returns:
        The groups, and the class of each.
    """
    if len(survival.class_of) > 2 * len(requests) + 256:
        survival.keep_only(request.request_id for request in requests)
    counts: Counter[tuple[int, int | None, int | None]] = Counter()
    for request in requests:
        pin = request.pinned_draft_length
        copied = survival.copied_class(request)
        counts[
            survival.see(request), None if pin is None else bounded(pin), copied
        ] += 1
    groups = []
    for (class_id, pin, copied), count in counts.items():
        offsets = survival.confidence_offsets(class_id) if may_split else ()
        first = survival.log_odds_of_class(class_id)[0] if offsets else 0.0
        chances = survival.survival_of_class(class_id)
        offered = survival.survival_of_copies(copied)
        groups.append(Group(count, chances, pin, offsets, first, offered))
    return groups, [class_id for class_id, *_ in counts]
