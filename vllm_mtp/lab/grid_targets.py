"""The stated targets of the grid, each with what was measured for it. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

OF_EVERY_CELL = (
    ("plus_over_best_static", "the best static K of that cell", 0.97),
    ("plus_over_none", "no speculation", 0.98),
)
"""Key in a cell's summary, words, and the limit."""
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
        *(
            _of_every_cell(cells, f"mtp_plus over {words}, in every cell", key, limit)
            for key, words, limit in OF_EVERY_CELL
        ),
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
    cells: Sequence[Mapping[str, Any]], name: str, key: str, limit: float
) -> dict[str, Any]:
    worst = min(cells, key=lambda cell: float(cell[key]["median"]))
    missed = sum(cell[key]["median"] < limit for cell in cells)
    return {
        "name": name,
        "limit": limit,
        "value": worst[key]["median"],
        "is_reached": missed == 0,
        "num_cells_missed": missed,
        "worst_cell": worst["name"],
    }
