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

    Raises:
        OSError: It could not be fetched (`urllib.error.URLError` is one).
    """
    with _OPENER.open(url, timeout=HTTP_TIMEOUT_S) as response:
        text: str = response.read().decode()
    return text


def find_cause(lines: Sequence[str]) -> str | None:
    """First exception that a log reports, if any: the later ones follow from it."""
    for line in lines:
        found = EXCEPTION.search(line)
        if found:
            return found.group(0)
    return None


def log_error(what: str, log: Path) -> ServerError:
    """An error with its cause and the end of a log."""
    lines = log.read_text(errors="replace").splitlines()
    cause = find_cause(lines)
    tail = "\n".join(f"  | {line}" for line in lines[-LOG_TAIL_LINES:])
    because = f", after {cause!r}" if cause else ""
    return ServerError(f"{what}{because}; the end of {log}:\n{tail}")


@contextmanager
def log_folder() -> Iterator[Path]:
    """A folder for the logs, kept when a server failed: then they are needed."""
    folder = Path(tempfile.mkdtemp(prefix="vllm-mtp-"))
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


class Program:
    """A process with its group and its log."""

    def __init__(self, label: str, command: Sequence[str], log: Path) -> None:
        """Describe a program; nothing is started."""
        self.label = label
        self.command = list(command)
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process, which leads its session.

        Raises:
            ServerError: It was never started.
        """
        if self._process is None:
            raise ServerError(f"{self.label} was not started")
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
        """Notice a dead process.

        Raises:
            ServerError: It has ended.
        """
        status = self._process.poll() if self._process else None
        if status is not None:
            raise self.error(f"ended with exit code {status}")

    def wait_done(self, timeout_s: float) -> None:
        """Wait until it has done its work.

        Raises:
            ServerError: It failed, or the time is over.
        """
        self.wait(timeout_s)
        status = self._process.poll() if self._process else None
        if status is None:
            raise self.error(f"did not end within {timeout_s:.0f} s")
        if status:
            raise self.error(f"ended with exit code {status}")

    def error(self, what: str) -> ServerError:
        """An error about this process, with the end of its log."""
        return log_error(f"{self.label} {what}", self.log)

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


class Server(Program):
    """One ``vllm serve``."""

    def __init__(self, name: str, command: Sequence[str], port: int, log: Path) -> None:
        """Describe a server; nothing is started."""
        super().__init__(f"the server for {name!r}", command, log)
        self.name = name
        self.url = f"http://127.0.0.1:{port}"

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


class ProgramGroup:
    """Programs that start together and are stopped together, whatever happens."""

    def __init__(self, programs: Sequence[Program], environ: Mapping[str, str]) -> None:
        """Describe the group; nothing is started."""
        self.programs = list(programs)
        self._environ = environ

    def __enter__(self) -> Self:
        """Start all members, or none."""
        try:
            for program in self.programs:
                program.start(self._environ)
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

    def stop(self) -> None:
        """Stop every process of every member; a second Ctrl-C cannot prevent it."""
        with _interrupts_ignored():
            for program in self.programs:
                program.signal_group(signal.SIGTERM)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            for program in self.programs:
                program.wait(max(0.0, deadline - time.monotonic()))
            for program in self.programs:
                # Whoever is left of the group, even when its leader has gone.
                program.signal_group(signal.SIGKILL)
                program.wait(KILL_TIMEOUT_S)


class ServerGroup(ProgramGroup):
    """Servers that start together and are stopped together, whatever happens."""

    def __init__(self, servers: Sequence[Server], environ: Mapping[str, str]) -> None:
        """Describe the group; nothing is started."""
        super().__init__(servers, environ)
        self.servers = list(servers)

    def wait_ready(self, timeout_s: float, report: Callable[[str], None]) -> None:
        """Wait until every member answers.

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
                first = waiting[0]
                report(f"{elapsed_s:3.0f} s, {first.name}: {first.stage()}")
                time.sleep(POLL_S)


def serve_environ(
    environ: Mapping[str, str], scratch: Path, local_model: bool, on_gpu: bool
) -> dict[str, str]:
    """Variables of a server: quick to start, quiet, and nothing sent anywhere.

    On a CPU engine and worker share the server's process, which saves the import of
    vLLM in two more.
    """
    added = {"VLLM_NO_USAGE_STATS": "1", "TMPDIR": str(scratch)}
    if not on_gpu:
        added["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if local_model:
        added |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return {**environ, **added}


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
