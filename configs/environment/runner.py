"""Runs the commands of a set-up: quiet, logged, with a sign of life, one at a time."""

import fcntl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HEARTBEAT_S = 20.0
LOG_TAIL_LINES = 25


class SetupError(Exception):
    """The set-up cannot go on; the message is one sentence for the user."""


def say(text: str) -> None:
    """Print a progress line; standard output stays free for `make -s python`."""
    print(f"setup: {text}", file=sys.stderr, flush=True)


class Steps:
    """Numbered steps of one set-up, each a command whose output goes to a log."""

    def __init__(self, total: int, log: Path) -> None:
        """Start counting.

        Args:
            total: Number of steps that will be announced.
            log: File that receives the output of every command.
        """
        self._total = total
        self._done = 0
        self._log = log
        self._start = time.monotonic()

    def announce(self, title: str) -> None:
        """Print the next step's number, title and the seconds since the start."""
        self._done += 1
        elapsed_s = time.monotonic() - self._start
        say(f"step {self._done}/{self._total} at {elapsed_s:3.0f} s: {title}")

    def run(self, command: Sequence[str | Path]) -> None:
        """Run a command to its end.

        Args:
            command: Program and arguments; no shell.

        Raises:
            SetupError: It exited with an error; the log's tail has been shown.
        """
        with self._log.open("a") as log:
            log.write(f"\n$ {' '.join(map(str, command))}\n")
            log.flush()
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                status = self._wait(process)
            except BaseException:
                process.terminate()
                process.wait()
                raise
        if status != 0:
            self._show_log_tail()
            raise SetupError(
                f"step {self._done}/{self._total} failed with exit code {status}; "
                f"the whole log is {self._log}"
            )

    def last_line(self) -> str:
        """Last line that the commands so far have written."""
        return self._log.read_text(errors="replace").splitlines()[-1]

    def _wait(self, process: "subprocess.Popen[bytes]") -> int:
        start = time.monotonic()
        while True:
            try:
                return process.wait(timeout=HEARTBEAT_S)
            except subprocess.TimeoutExpired:
                say(f"  ... still at it, {time.monotonic() - start:.0f} s")

    def _show_log_tail(self) -> None:
        lines = self._log.read_text(errors="replace").splitlines()
        for line in lines[-LOG_TAIL_LINES:]:
            print(f"  | {line}", file=sys.stderr)


@contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    """Hold a lock between processes; it ends with the process that holds it.

    Args:
        lock: Lock file, created when missing, never removed (a waiting process
            may already have it open).
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is at work on the same environment; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
