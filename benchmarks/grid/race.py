"""Who plays in which repeat of a cell. Pure.

A static draft length that cannot win is spared rounds: one that was hopelessly behind
in the warm-up is measured there only, and those longer than it are not measured (each
further draft token costs as much as the one before and is accepted less often); one
that was far behind in the first repeat is spared the others.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.grid.journal import ENGINE, ROUND, WARM_UP, Journal
from benchmarks.grid.options import PLUS, PLUS_AGAIN
from benchmarks.options import AGAIN
from vllm_mtp.tools.engine_process import NO_SPECULATION

HOPELESS = 0.65
"""Of the best static K's speed in the warm-up, where rounds differ by 10 to 20 %."""
FAR_BEHIND = 0.9
"""Of the best static K's speed in a repeat, where rounds differ by a few percent."""

GROUP_SIZE = 3
"""Static lengths that warm up together, the shortest first."""

Record = Mapping[str, Any]


def is_static(contender: str) -> bool:
    """Whether a contender is vLLM's `mtp` with a fixed K."""
    return contender not in (NO_SPECULATION, AGAIN, PLUS, PLUS_AGAIN)


def draft_length(static: str) -> int:
    """K of a static contender."""
    return int(static.partition("=")[2])


def warm_up_groups(names: Sequence[str]) -> list[list[str]]:
    """Who warms up together: all with the shortest static lengths, then longer."""
    static = sorted(filter(is_static, names), key=draft_length)
    longer = static[GROUP_SIZE:]
    starts = range(0, len(longer), GROUP_SIZE)
    return [
        [name for name in names if name not in longer],
        *(longer[start : start + GROUP_SIZE] for start in starts),
    ]


def unmeasured_contenders(journal: Journal, cell_name: str) -> set[str]:
    """Static lengths without a single round, since a shorter one was hopeless."""
    hopeless = hopeless_contenders(journal, cell_name)
    if not hopeless:
        return set()
    shortest = min(map(draft_length, hopeless))
    names = {engine["contender"] for engine in journal.of_kind(ENGINE)}
    without_round = names - warm_up_rounds(journal, cell_name).keys()
    return {n for n in filter(is_static, without_round) if draft_length(n) > shortest}


def warm_up_rounds(journal: Journal, cell_name: str) -> dict[str, Record]:
    """The first warm-up of each contender in a cell: later ones change nothing."""
    rounds: dict[str, Record] = {}
    for record in journal.of_kind(WARM_UP):
        if record["cell"] == cell_name:
            rounds.setdefault(record["contender"], record)
    return rounds


def hopeless_contenders(journal: Journal, cell_name: str) -> set[str]:
    """Static lengths that are measured in the warm-up only."""
    return _slower(HOPELESS, warm_up_rounds(journal, cell_name).values())


def spared_contenders(journal: Journal, cell_name: str) -> set[str]:
    """Static lengths that are measured in the first repeat at most."""
    first = (
        record
        for record in journal.of_kind(ROUND)
        if record["cell"] == cell_name and record["repeat"] == 0
    )
    hopeless = hopeless_contenders(journal, cell_name)
    return hopeless | _slower(FAR_BEHIND, first)


def _slower(share: float, rounds: Iterable[Record]) -> set[str]:
    speeds = {
        record["contender"]: record["full_tokens"] / record["full_seconds"]
        for record in rounds
        if is_static(record["contender"]) and record["full_seconds"]
    }
    needed = share * max(speeds.values(), default=0.0)
    return {name for name, speed in speeds.items() if speed < needed}
