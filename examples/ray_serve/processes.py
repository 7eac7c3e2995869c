"""Which processes were started, by whom, and whether they have ended. Linux."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

PERIOD_S = 0.2
END_TIMEOUT_S = 20.0


class Process(NamedTuple):
    """A number alone is given to another process later."""

    pid: int
    started_at: str
    """In ticks since the machine was started."""


class ProcessWatch:
    """Notes all that this process starts, and what those start, while it lasts.

    They stay noted when their parent dies and they become another's.
    """

    def __enter__(self) -> Self:
        """Begin; what runs already is not noted."""
        self._known: set[Process] = set()
        self._before = set(_descendants({os.getpid()}))
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop noting."""
        self._is_over.set()
        self._thread.join()

    def living(self, name: str = "") -> dict[int, str]:
        """Those that run, by number: their command lines.

        Args:
            name: That the command line must contain.
        """
        self._note()
        known = {process.pid for process, _ in _all() if process in self._known}
        lines = {pid: _command_line(pid) for pid in known}
        return {pid: line for pid, line in lines.items() if line and name in line}

    def end_all(self, timeout_s: float = END_TIMEOUT_S) -> dict[int, str]:
        """Wait until all have ended, and end those that have not.

        Returns:
            Those that had to be ended.
        """
        deadline_s = time.monotonic() + timeout_s
        while (left := self.living()) and time.monotonic() < deadline_s:
            time.sleep(PERIOD_S)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left

    def _watch(self) -> None:
        while not self._is_over.wait(PERIOD_S):
            self._note()

    def _note(self) -> None:
        ancestors = {os.getpid(), *(process.pid for process in self._known)}
        self._known |= set(_descendants(ancestors)) - self._before


def _all() -> Iterator[tuple[Process, int]]:
    """Every process that runs, and its parent."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError, IndexError):
            # Behind the name, which may contain anything.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                yield Process(int(folder.name), fields[19]), int(fields[1])


def _descendants(pids: set[int]) -> Iterator[Process]:
    by_parent: dict[int, list[Process]] = {}
    for process, parent in _all():
        by_parent.setdefault(parent, []).append(process)
    waiting, seen = list(pids), set(pids)
    while waiting:
        for process in by_parent.get(waiting.pop(), ()):
            yield process
            if process.pid not in seen:
                seen.add(process.pid)
                waiting.append(process.pid)


def _command_line(pid: int) -> str:
    """Empty once it has ended."""
    with suppress(OSError):
        text = Path(f"/proc/{pid}/cmdline").read_bytes()
        return text.replace(b"\0", b" ").decode(errors="replace").strip()
    return ""
