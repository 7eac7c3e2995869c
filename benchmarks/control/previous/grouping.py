"""A batch as plans see it: requests of each class, and what is believed of them."""

from collections import Counter
from collections.abc import Callable, Sequence

from benchmarks.control.previous.planner import Batch, Group, PinnedGroup
from benchmarks.control.previous.survival import SurvivalModel
from vllm_mtp.records import DecodeRequest


def grouped(
    requests: Sequence[DecodeRequest],
    survival: SurvivalModel,
    *,
    bounded: Callable[[int], int],
    optimism: float,
    num_known: int,
    may_split: bool,
) -> Batch:
    """Sort requests into classes that plans do not tell apart.

    Args:
        requests: Those that decode. The model sees all of them, and forgets others
            where it knows far too many.
        survival: What is believed of acceptance.
        bounded: The draft length that a pinned one becomes.
        optimism: Deviations that the optimistic survival lies above the expected one.
        num_known: Positions that the plan in use drafts, so that luck shows.
        may_split: Drafts of a class may differ by confidence.
    """
    if len(survival.class_of) > 2 * len(requests) + 256:
        survival.keep_only(request.request_id for request in requests)
    free: Counter[int] = Counter()
    pinned: Counter[tuple[int, int]] = Counter()
    for request in requests:
        class_id = survival.see(request)
        if request.pinned_draft_length is None:
            free[class_id] += 1
        else:
            pinned[class_id, bounded(request.pinned_draft_length)] += 1
    return Batch(
        [
            Group(
                count,
                survival.survival_of_class(class_id),
                survival.optimistic_survival_of_class(class_id, optimism, num_known),
                survival.confidence_offsets(class_id) if may_split else (),
            )
            for class_id, count in free.items()
        ],
        [
            PinnedGroup(count, length, survival.survival_of_class(class_id))
            for (class_id, length), count in pinned.items()
        ],
    )
