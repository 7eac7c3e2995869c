"""The stated targets of the grid, each with what was measured for it. Pure."""

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


def judge(
    cells: Sequence[Mapping[str, Any]], overall: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """All targets; the limits hold for the medians.

    Args:
        cells: Summaries.
        overall: Summary of the grid; empty where there are no cells.
    """
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
            "worst_cell": None,
        },
    ]


def _of_every_cell(
    cells: Sequence[Mapping[str, Any]], target: CellTarget
) -> dict[str, Any]:
    worst = min(cells, key=lambda cell: float(cell[target.key]["median"]))
    missed = sum(cell[target.key]["median"] < target.limit for cell in cells)
    return {
        "name": f"mtp_plus over {target.rival}, in every cell",
        "limit": target.limit,
        "value": worst[target.key]["median"],
        "is_reached": missed == 0,
        "num_cells_missed": missed,
        "worst_cell": worst["name"],
    }
