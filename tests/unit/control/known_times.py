"""Step times that a test sets as it likes."""

from collections.abc import Sequence

from vllm_mtp.control.step_times import Times


def times_of(
    verify: Sequence[float],
    mixed: float = 0.0,
    draft: float = 0.1,
    entry: float = 0.0,
    scale_s: float = 1.0,
) -> Times:
    """Known times.

    Args:
        verify: Of a pass at K = 0 .. K_max, the first one 1.
        mixed: What unequal draft lengths take beside that.
        draft: Of a draft step.
        entry: Of drafting at all.
        scale_s: Seconds that 1 stands for.
    """
    assert verify[0] == 1.0
    rows = [seconds - 1.0 for seconds in verify[1:]]
    return Times(scale_s, [0.0, mixed, entry, draft, *rows])
