"""Whose turn it is, and on which core."""

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.grid.turns import separate_cores, take_turns


class FakePlayer:
    """An engine whose every turn takes as long, until it is done."""

    def __init__(
        self, name: str, turn_s: float, num_turns: int, log: list[tuple[str, str]]
    ) -> None:
        self.name = name
        self.turn_s = turn_s
        self.left = num_turns
        self.log = log
        self.seconds = 0.0
        self.cores: list[int | None] = []

    def tell(self, command: str, **arguments: Any) -> None:
        assert command == "step"
        assert self.left, "told to go on when it was done"
        self.cores.append(arguments["core"])
        self.log.append(("tell", self.name))

    def answer(self) -> dict[str, Any]:
        self.log.append(("answer", self.name))
        self.left -= 1
        self.seconds += self.turn_s
        return {"seconds": self.seconds, "is_done": not self.left}


def play(
    turns: dict[str, tuple[float, int]], cores: Sequence[int | None]
) -> tuple[dict[str, FakePlayer], list[tuple[str, str]]]:
    log: list[tuple[str, str]] = []
    players = {name: FakePlayer(name, *each, log) for name, each in turns.items()}
    take_turns(players, cores, 0.1)
    return players, log


EQUAL = dict.fromkeys(("a", "b", "c"), (1.0, 8))


def test_two_work_at_once_and_once_on_each_core() -> None:
    players, log = play(EQUAL, [1, 0])
    assert log[:4] == [("tell", "a"), ("tell", "b"), ("answer", "a"), ("answer", "b")]
    assert players["a"].cores[:2] == [1, 0]
    assert players["b"].cores[:2] == [0, 1]
    for player in players.values():
        assert not player.left
        assert player.cores.count(0) == player.cores.count(1) == 4


def test_never_two_on_one_core() -> None:
    players, log = play({"a": (1.0, 5), "b": (0.4, 9), "c": (2.0, 2)}, [1, 0])
    cores = {name: iter(player.cores) for name, player in players.items()}
    working: dict[str, int | None] = {}
    for event, name in log:
        if event == "answer":
            del working[name]
            continue
        working[name] = next(cores[name])
        assert len(set(working.values())) == len(working) <= 2


def test_the_clocks_that_are_behind_go_next() -> None:
    players, log = play({"slow": (2.0, 10), "fast": (0.5, 40)}, [None])
    told = [name for event, name in log if event == "tell"]
    assert told[:6] == ["slow", "fast", "fast", "fast", "fast", "slow"]
    assert all(core is None for each in players.values() for core in each.cores)


def test_one_that_is_done_is_left_in_peace() -> None:
    players, _ = play({"short": (1.0, 1), "long": (1.0, 7)}, [1, 0])
    assert players["short"].cores == [1]
    assert players["long"].cores == [0, 1, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("siblings", "expected"),
    [
        ({0: "0", 1: "1", 2: "2"}, [2, 1, 0]),
        ({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, [3, 2]),
        ({0: "0-1", 1: "0-1"}, [1]),
    ],
)
def test_halves_of_one_core_count_once(
    siblings: dict[int, str], expected: list[int]
) -> None:
    assert separate_cores(set(siblings), siblings.__getitem__) == expected
