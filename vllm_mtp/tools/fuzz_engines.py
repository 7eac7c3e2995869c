"""Engines of the fuzzer, in processes of their own: one that dies takes nothing along.

`Start` is what a test replaces to have them in its own process, where it plants faults.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from vllm_mtp.tools.engine_process import START_TIMEOUT_S, EngineGroup
from vllm_mtp.tools.server_process import ServerError

COUNTS = (
    *("drafted", "accepted", "num_steps", "num_preempted"),
    *("num_disturbed", "num_adapted", "num_loaded_tokens", "num_copied"),
)
"""What is added up over plays; see ``CommandedEngine.play``."""


class Engine(Protocol):
    """Obeys the commands of ``integration/commands/commanded_engine.py``."""

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for the answer."""


Start = Callable[[str, Mapping[str, Any]], AbstractContextManager[Engine]]
"""Starts an engine by its name and arguments of ``EngineArgs``, for a while."""


def process_starter(logs: Path) -> Start:
    """Each engine in a process of its own."""
    numbers = iter(range(10**6))

    @contextmanager
    def start(name: str, arguments: Mapping[str, Any]) -> Iterator[Engine]:
        log = logs / f"{next(numbers)}-{name.replace(' ', '-')}.log"
        with EngineGroup() as group:
            engine = group.start(name, arguments, log)
            engine.answer(START_TIMEOUT_S)
            yield engine

    return start


class Player:
    """Plays in an engine, and starts another one when it has died."""

    def __init__(
        self, start: Start, name: str, arguments: Mapping[str, Any], max_starts: int
    ) -> None:
        """Nothing is started before the first play."""
        self.name = name
        self.num_starts = 0
        self.counts = dict.fromkeys(COUNTS, 0)
        """Over all plays."""
        self._start = start
        self._arguments = arguments
        self._max_starts = max_starts
        self._open: AbstractContextManager[Engine] | None = None
        self._engine: Engine | None = None

    @property
    def can_play(self) -> bool:
        """Whether there is an engine, or may be one."""
        return self._engine is not None or self.num_starts < self._max_starts

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Have a command obeyed that does not play."""
        return self._running().ask(command, **arguments)

    def play(
        self,
        requests: list[dict[str, Any]],
        is_undisturbed: bool = False,
        seed: int = 0,
    ) -> dict[str, Any]:
        """See ``integration/fuzz/engine.py``; an engine that died is replaced."""
        engine = self._running()
        try:
            played = engine.ask(
                "play", requests=requests, is_undisturbed=is_undisturbed, seed=seed
            )
        except ServerError as error:
            names = [request["name"] for request in requests]
            played = {"answers": {}, "died": str(error)[-2000:], "in_flight": names}
        for count in self.counts:
            self.counts[count] += played.get(count, 0)
        if played["died"]:
            self.close()
        return played

    def _running(self) -> Engine:
        if self._engine is None:
            self.num_starts += 1
            self._open = self._start(self.name, self._arguments)
            self._engine = self._open.__enter__()
        return self._engine

    def close(self) -> None:
        """End the engine, if there is one."""
        opened, self._open, self._engine = self._open, None, None
        if opened is not None:
            opened.__exit__(None, None, None)
