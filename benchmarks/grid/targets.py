"""The stated targets of the grid, each with what was measured for it. Pure."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class CellTarget(NamedTuple):
    """A limit that every cell must reach."""

    key: str
    """In a cell's summary."""
    rival: str
    limit: float


OVER_BEST_STATIC = CellTarget(
    "plus_over_best_static", "the best static K of that cell", 0.97
)
OVER_NONE = CellTarget("plus_over_none", "no speculation", 0.98)
MIN_OVER_BEST_SINGLE = 1.10
CLEAR = 1.5
"""Standard errors between a median and its limit."""
USUAL_DEVIATION = 0.02
"""Of the log of a ratio; counts as much as two more repeats, because the deviation of
three alone is hardly known."""
USUAL_WEIGHT = 2
MEDIAN_ERROR = 1.25
"""Standard error of a median, of that of a mean."""


def judge(
    cells: Sequence[Mapping[str, Any]], overall: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """All targets; the limits hold for the medians."""
    if not cells:
        return []
    value = overall["plus_over_best_single_static"]
    return [
        *(_of_every_cell(cells, target) for target in (OVER_BEST_STATIC, OVER_NONE)),
        {
            "name": "mtp_plus over the best single static K, geometric mean",
            "limit": MIN_OVER_BEST_SINGLE,
            "value": value,
            "is_reached": value >= MIN_OVER_BEST_SINGLE,
            "num_cells_missed": None,
            "num_cells_clearly_missed": None,
            "worst_cell": None,
        },
    ]


def _of_every_cell(
    cells: Sequence[Mapping[str, Any]], target: CellTarget
) -> dict[str, Any]:
    worst = min(cells, key=lambda cell: float(cell[target.key]["median"]))
    missed = sum(cell[target.key]["median"] < target.limit for cell in cells)
    clearly = sum(
        errors_above(cell[target.key]["each"], target.limit) < -CLEAR for cell in cells
    )
    return {
        "name": f"mtp_plus over {target.rival}, in every cell",
        "limit": target.limit,
        "value": worst[target.key]["median"],
        "is_reached": missed == 0,
        "num_cells_missed": missed,
        "num_cells_clearly_missed": clearly,
        "worst_cell": worst["name"],
    }


def errors_above(ratios: Sequence[float], limit: float) -> float:
    """How far the median of ratios is above a limit, in its standard errors."""
    logs = [math.log(ratio) for ratio in ratios]
    mean, number = statistics.fmean(logs), len(logs)
    squares = sum((each - mean) ** 2 for each in logs)
    squares += USUAL_WEIGHT * USUAL_DEVIATION**2
    deviation = math.sqrt(squares / (number - 1 + USUAL_WEIGHT))
    error = MEDIAN_ERROR * deviation / math.sqrt(number)
    return (statistics.median(logs) - math.log(limit)) / error
