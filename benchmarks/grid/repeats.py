"""How often a cell of the grid is measured: until it is clear where it lies. Pure.

Ratios of rounds scatter by 1 to 5 %, and a limit may be 1 % away. So a cell is measured
again while a median is too close to its limit, on either side, for what the ratios
scatter; then only those play whom the limit is about. The rule looks at the distance
alone: a cell just above its limit is measured as often as one just below, and no round
is left out of the result.
"""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.grid.cells import Cell
from benchmarks.grid.journal import Journal
from benchmarks.grid.options import PLUS, PLUS_AGAIN, GridOptions
from benchmarks.grid.race import (
    hopeless_contenders,
    spared_contenders,
    unmeasured_contenders,
)
from benchmarks.grid.summary import plus_over_static, summarise_cell, whole_repeats
from benchmarks.grid.targets import (
    CLEAR,
    OVER_BEST_STATIC,
    OVER_NONE,
    CellTarget,
    errors_above,
)
from benchmarks.options import AGAIN
from vllm_mtp.tools.engine_process import NO_SPECULATION

NEARLY_BEST = 1.04
"""A static K that is so close to the best one of the cell may yet turn out the best."""


class Repeat(NamedTuple):
    """What to measure next in a cell."""

    number: int
    names: list[str]
    """Of those who play."""


def next_repeat(journal: Journal, cell: Cell, options: GridOptions) -> Repeat | None:
    """The repeat to measure next; None where the cell is done."""
    done = whole_repeats(journal, cell.name)
    number = next(repeat for repeat in range(len(done) + 1) if repeat not in done)
    names = [contender.name for contender in options.contenders]
    if number < options.num_repeats:
        find_spared = spared_contenders if number else hopeless_contenders
        spared = find_spared(journal, cell.name)
        spared |= unmeasured_contenders(journal, cell.name)
        return Repeat(number, [name for name in names if name not in spared])
    if number >= options.max_repeats:
        return None
    rivals = _unclear_rivals(journal, cell)
    if not rivals:
        return None
    players = {PLUS, PLUS_AGAIN, *rivals}
    return Repeat(number, [name for name in names if name in players])


def _unclear_rivals(journal: Journal, cell: Cell) -> set[str]:
    """Those against whom it is not clear on which side of its limit `mtp_plus` is."""
    summary = summarise_cell(journal, cell.name)
    rivals = set()
    if not _is_clear(summary[OVER_NONE.key]["each"], OVER_NONE):
        rivals |= {NO_SPECULATION, AGAIN}
    if not _is_clear(summary[OVER_BEST_STATIC.key]["each"], OVER_BEST_STATIC):
        ratios = plus_over_static(journal, cell.name)
        nearly = NEARLY_BEST * min(ratios.values())
        rivals |= {name for name, ratio in ratios.items() if ratio <= nearly}
    return rivals


def _is_clear(ratios: Sequence[float], target: CellTarget) -> bool:
    return abs(errors_above(ratios, target.limit)) > CLEAR
