"""How often a cell of the grid is measured: until it is clear where it lies. Pure.

Ratios of rounds scatter by 1 to 5 %, and a limit may be 1 % away. So a cell is measured
again while its medians are too close to their limits, on either side, for what they
scatter. The rule looks at the distance alone: a cell just above its limit is measured
as often as one just below, and no round is left out of the result.
"""

import math
import statistics
from collections.abc import Sequence

from vllm_mtp.lab.grid_cells import Cell
from vllm_mtp.lab.grid_journal import Journal
from vllm_mtp.lab.grid_options import GridOptions
from vllm_mtp.lab.grid_summary import summarise_cell, whole_repeats
from vllm_mtp.lab.grid_targets import OF_EVERY_CELL

CLEAR = 1.5
"""Standard errors between a median and its limit."""
USUAL_DEVIATION = 0.02
"""Of the log of a ratio; counts as much as two more repeats, because the deviation of
three alone is hardly known."""
USUAL_WEIGHT = 2
MEDIAN_ERROR = 1.25
"""Standard error of a median, of that of a mean."""


def next_repeat(journal: Journal, cell: Cell, options: GridOptions) -> int | None:
    """The repeat to measure next; None where the cell is done.

    Args:
        journal: What has been measured.
        cell: Where in the grid.
        options: What the user chose.
    """
    done = whole_repeats(journal, cell.name)
    missing = next(repeat for repeat in range(len(done) + 1) if repeat not in done)
    if missing < options.num_repeats:
        return missing
    if missing >= options.max_repeats or is_clear(journal, cell):
        return None
    return missing


def is_clear(journal: Journal, cell: Cell) -> bool:
    """Whether it is clear for each limit on which side of it the cell lies."""
    summary = summarise_cell(journal, cell.name)
    return all(
        _is_far_from(limit, summary[key]["each"]) for key, _, limit in OF_EVERY_CELL
    )


def _is_far_from(limit: float, ratios: Sequence[float]) -> bool:
    logs = [math.log(ratio) for ratio in ratios]
    mean, number = statistics.fmean(logs), len(logs)
    squares = sum((each - mean) ** 2 for each in logs)
    squares += USUAL_WEIGHT * USUAL_DEVIATION**2
    deviation = math.sqrt(squares / (number - 1 + USUAL_WEIGHT))
    error = MEDIAN_ERROR * deviation / math.sqrt(number)
    return abs(statistics.median(logs) - math.log(limit)) > CLEAR * error
