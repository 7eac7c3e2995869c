"""Starts `vllm serve` processes, says what they are doing, and always stops them.

Each server leads a process group of its own: its engine is a child of a child, and
stopping the group is the only way to be sure of all of them. Only groups that were
started here are ever signalled.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

LOG_TAIL_LINES = 20
POLL_S = 0.3
STOP_TIMEOUT_S = 8.0
KILL_TIMEOUT_S = 3.0
HTTP_TIMEOUT_S = 10.0

# What the log says, in plain words; the last line found counts.
STAGES = (
    ("Resolved architecture", "starting the engine process"),
    ("Initializing a V1 LLM engine", "initializing the engine"),
    ("Starting to load model", "loading weights"),
    ("KV cache size", "warming up"),
    ("Starting vLLM server", "opening the port"),
)
FIRST_STAGE = "importing vLLM"

# The last line of a traceback, behind the name of the process that vLLM puts there.
EXCEPTION = re.compile(r"(?<![\w.])[A-Za-z_][\w.]*(?:Error|Exception): \S.*")

# Servers are on this machine: a proxy that the user has for the world is not asked.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(RuntimeError):
    """A server died or did not answer in time; the message ends with its log."""


def http_get(url: str) -> str:
    """Body of a page of a server on this machine.

    Args:
        url: Address on the loopback interface.

    Returns:
        The text.

    Raises:
        OSError: It could not be fetched (`urllib.error.URLError` is one).
    """
    with _OPENER.open(url, timeout=HTTP_TIMEOUT_S) as response:
        text: str = response.read().decode()
    return text


def find_cause(lines: Sequence[str]) -> str | None:
    """First exception that a log reports: the later ones follow from it.

    Args:
        lines: Of the log.

    Returns:
        The exception's type and message; None when the log has none.
    """
    for line in lines:
        found = EXCEPTION.search(line)
        if found:
            return found.group(0)
    return None


def log_error(what: str, log: Path) -> ServerError:
    """An error with its cause and the end of a log.

    Args:
        what: Who failed, and how.
        log: Of the process.
    """
    lines = log.read_text(errors="replace").splitlines()
    cause = find_cause(lines)
    tail = "\n".join(f"  | {line}" for line in lines[-LOG_TAIL_LINES:])
    because = f", after {cause!r}" if cause else ""
    return ServerError(f"{what}{because}; the end of {log}:\n{tail}")


@contextmanager
def log_folder() -> Iterator[Path]:
    """A folder for the logs, kept when a server failed: then they are needed."""
    folder = Path(tempfile.mkdtemp(prefix="vllm-mtp-demo-"))
    is_needed = False
    try:
        yield folder
    except ServerError:
        is_needed = True
        raise
    finally:
        if not is_needed:
            shutil.rmtree(folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


class Server:
    """One `vllm serve` process with its group and its log."""

    def __init__(
        self, label: str, command: Sequence[str], port: int, log: Path
    ) -> None:
        """Describe a server; nothing is started.

        Args:
            label: Name for the user.
            command: Program and arguments.
            port: The port that `command` makes it listen on.
            log: File for its output.
        """
        self.label = label
        self.command = list(command)
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process, which leads its session.

        Raises:
            ServerError: It was never started.
        """
        if self._process is None:
            raise ServerError(f"the server for {self.label!r} was not started")
        return self._process.pid

    def start(self, environ: Mapping[str, str]) -> None:
        """Start the process as the leader of a new group."""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def check_alive(self) -> None:
        """Notice a dead server.

        Raises:
            ServerError: It has ended.
        """
        status = self._process.poll() if self._process else None
        if status is not None:
            raise self.error(f"ended with exit code {status}")

    def is_ready(self) -> bool:
        """Whether it answers requests.

        Raises:
            ServerError: It has ended.
        """
        self.check_alive()
        try:
            http_get(f"{self.url}/health")
        except OSError:
            return False
        return True

    def stage(self) -> str:
        """What it is doing while it starts."""
        text = self.log.read_text(errors="replace")
        reached = [(text.rfind(mark), words) for mark, words in STAGES]
        position, words = max(reached)
        return words if position >= 0 else FIRST_STAGE

    def error(self, what: str) -> ServerError:
        """An error about this server, with the end of its log."""
        return log_error(f"the server for {self.label!r} {what}", self.log)

    def signal_group(self, signal_number: int) -> None:
        """Send a signal to the process and all its children, if any are left."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal_number)

    def wait(self, timeout_s: float) -> None:
        """Wait for the process, at most so long."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)


def describe(servers: Sequence[Server]) -> str:
    """Who is starting and what each is doing: `a, b (loading weights); c (...)`."""
    by_stage: dict[str, list[str]] = {}
    for server in servers:
        by_stage.setdefault(server.stage(), []).append(server.label)
    return "; ".join(
        f"{', '.join(labels)} ({stage})" for stage, labels in by_stage.items()
    )


class ServerGroup:
    """Servers that start together and are stopped together, whatever happens."""

    def __init__(self, servers: Sequence[Server], environ: Mapping[str, str]) -> None:
        """Describe the group; nothing is started.

        Args:
            servers: Members.
            environ: Variables of all of them.
        """
        self.servers = list(servers)
        self._environ = environ

    def __enter__(self) -> Self:
        """Start all members, or none."""
        try:
            for server in self.servers:
                server.start(self._environ)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop all members."""
        self.stop()

    def wait_ready(self, timeout_s: float, report: Callable[[str], None]) -> None:
        """Wait until every member answers.

        Args:
            timeout_s: Time limit.
            report: Called a few times a second with a line about who is waited for.

        Raises:
            ServerError: One died, or the time is over.
        """
        start = time.monotonic()
        waiting = self.servers
        while waiting:
            waiting = [server for server in waiting if not server.is_ready()]
            elapsed_s = time.monotonic() - start
            if waiting and elapsed_s > timeout_s:
                raise waiting[0].error(f"did not answer within {timeout_s:.0f} s")
            if waiting:
                report(f"{elapsed_s:3.0f} s, waiting for {describe(waiting)}")
                time.sleep(POLL_S)

    def stop(self) -> None:
        """Stop every process of every member; a second Ctrl-C cannot prevent it."""
        with _interrupts_ignored():
            for server in self.servers:
                server.signal_group(signal.SIGTERM)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            for server in self.servers:
                server.wait(max(0.0, deadline - time.monotonic()))
            for server in self.servers:
                # Whoever is left of the group, even when its leader has gone.
                server.signal_group(signal.SIGKILL)
                server.wait(KILL_TIMEOUT_S)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that servers are stopped."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    previous = [signal.signal(number, leave) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)
