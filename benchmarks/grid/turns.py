"""Who works when, in a round of several engines: short turns, two engines at a time.

Neighbours on a virtual machine disturb it for 0.1 to 2 s, so engines are compared
within as little time as can be: turns are short; two engines work at once, on a core
each; and each pair works again with cores exchanged, because one core may be slower
than the other.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from vllm_mtp.tools.provenance import gpu_names

TURN_S = 0.08
"""How long an engine works after the first step of its turn, which is not timed
(`engine_round`); of a model of a few megabytes, which the caches would hold, the next
ones are slower, too."""

AT_ONCE = 2
"""Engines that work at the same time, as far as there are cores. More of them would
share more of the memory's bandwidth, and wait for the slowest of more."""

_SIBLINGS = "/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"


class Player(Protocol):
    """An engine in its process; see ``engine_process.EngineProcess``."""

    def tell(self, command: str, **arguments: Any) -> None:
        """Send a command without waiting."""

    def answer(self) -> dict[str, Any]:
        """What it says to the last command."""


def turn_cores() -> list[int | None]:
    """Cores on which engines take their turns; None where they are not told one.

    An engine that computes with several threads, or on a GPU, works alone. So does one
    on a machine whose cores are halves of one.
    """
    if gpu_names() or os.environ.get("OMP_NUM_THREADS", "1") != "1":
        return [None]
    return list(separate_cores(os.sched_getaffinity(0), _siblings)[:AT_ONCE])


def separate_cores(cores: set[int], siblings: Callable[[int], str]) -> list[int]:
    """Cores that are not halves of the same one, the last ones first."""
    chosen: dict[str, int] = {}
    for core in sorted(cores, reverse=True):
        chosen.setdefault(siblings(core), core)
    return list(chosen.values())


def take_turns(
    players: Mapping[str, Player], cores: Sequence[int | None], turn_s: float
) -> None:
    """Let engines work until all are done with their rounds.

    Those work next whose clocks are furthest behind, once on each core.
    """
    seconds = dict.fromkeys(players, 0.0)
    while seconds:
        names = sorted(seconds, key=seconds.__getitem__)[: len(cores)]
        for shift in range(len(cores)):
            playing = {
                name: cores[(place + shift) % len(cores)]
                for place, name in enumerate(names)
                if name in seconds
            }
            for name, core in playing.items():
                players[name].tell("step", seconds=turn_s, core=core)
            for name in playing:
                answer = players[name].answer()
                seconds[name] = answer["seconds"]
                if answer["is_done"]:
                    del seconds[name]


def _siblings(core: int) -> str:
    path = Path(_SIBLINGS.format(core=core))
    return path.read_text() if path.is_file() else str(core)
