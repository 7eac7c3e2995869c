"""Which rounds of a cell are still to be measured. Pure.

A static draft length that was far behind the best one in the first repeat cannot be
the best of its cell: it is spared the other repeats.
"""

from vllm_mtp.lab.demo_plan import NO_SPECULATION
from vllm_mtp.lab.grid_cells import Cell
from vllm_mtp.lab.grid_journal import ROUND, Journal
from vllm_mtp.lab.grid_options import PLUS, GridOptions

FAR_BEHIND = 0.85
"""Of the best static K's speed; rounds differ by a few percent."""


def spared_contenders(journal: Journal, cell_name: str) -> set[str]:
    """Static lengths that are measured in the first repeat only."""
    speeds = {
        record["contender"]: record["full_tokens"] / record["full_seconds"]
        for record in journal.of_kind(ROUND)
        if record["cell"] == cell_name and record["repeat"] == 0
    }
    static = {n: s for n, s in speeds.items() if n not in (NO_SPECULATION, PLUS)}
    needed = FAR_BEHIND * max(static.values(), default=0.0)
    return {name for name, speed in static.items() if speed < needed}


def missing_repeats(journal: Journal, cell: Cell, options: GridOptions) -> list[int]:
    """Repeats of which a contender's round is missing."""
    done = {
        (record["repeat"], record["contender"])
        for record in journal.of_kind(ROUND)
        if record["cell"] == cell.name
    }
    spared = spared_contenders(journal, cell.name)
    return [
        repeat
        for repeat in range(options.num_repeats)
        if any(
            (repeat, name) not in done and not (repeat and name in spared)
            for name, _ in options.contenders
        )
    ]
