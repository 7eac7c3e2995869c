"""Classes of requests that are believed to accept alike.

A *cell* is what is known of a request before its first draft: greedy or sampled, free
or constrained. A *class* adds the request's own shift in steps of `LEVEL_WIDTH`, so
that a batch falls into few classes and plans need not see requests.
"""

from vllm_mtp.records import DecodeRequest

LEVEL_WIDTH = 0.5
"""Log-odds of a step of the shift: an eighth of probability at most."""
NUM_LEVELS = 21
"""Shifts, from -5 to 5 log-odds: all of 0.7 % .. 99.3 %."""

_MEAN_LEVEL = NUM_LEVELS // 2


def cell_of(request: DecodeRequest) -> int:
    """Cell of a request, 0 to 3; odd ones are sampled."""
    return 2 * request.is_constrained + (not request.is_greedy)


def class_of(cell: int, shift: float) -> int:
    """Class of a request whose own shift is ``shift`` log-odds."""
    level = round(shift / LEVEL_WIDTH) + _MEAN_LEVEL
    return cell * NUM_LEVELS + min(max(level, 0), NUM_LEVELS - 1)


def cell_of_class(class_id: int) -> int:
    """Cell of a class."""
    return class_id // NUM_LEVELS


def shift_of_class(class_id: int) -> float:
    """Shift of a class, log-odds."""
    return (class_id % NUM_LEVELS - _MEAN_LEVEL) * LEVEL_WIDTH
