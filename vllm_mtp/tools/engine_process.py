"""Engines in processes of their own, told what to do through a pipe.

What eval, verify, its fuzzer, doctor's probe and the benchmarks start and ask; the
other end is ``integration/commands/commanded_engine.py``. Each process leads a session
of its own, so Ctrl-C reaches only the command, which then stops them all; an engine
also ends by itself when the command is gone.

Processes are forked from one that has imported vLLM, which takes 10 to 20 s of a core,
and that does nothing else: no thread of a library runs in it. Drivers of a GPU had
better not be forked: there each process imports for itself.
"""

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

from vllm_mtp.tools.engine_arguments import EngineSize, engine_arguments, engine_environ
from vllm_mtp.tools.provenance import gpu_names
from vllm_mtp.tools.server_process import ServerError, log_error

NO_SPECULATION = "none"
"""Name of the engine that is the target alone."""

MODULE = "vllm_mtp.integration.commands.commanded_engine"
"""Has `obey`, the other end of the pipe."""
NO_COLLECTION = "vllm_mtp.tools.no_collection"
IMPORTS_LOG = "imports.log"
"""What vLLM prints when it is imported, beside the logs of engines."""

START_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 5.0


class Commanded(Protocol):
    """An engine that is told what to do, wherever it runs."""

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Have a command of ``CommandedEngine`` carried out."""


class EngineProcess:
    """One engine and the pipe to it."""

    def __init__(
        self, name: str, log: Path, environ: Mapping[str, str], module: str
    ) -> None:
        """Start the process; its engine is not started yet."""
        self.name = name
        self.log = log
        self._process, self._connection = _start_process(log, environ, module)

    def tell(self, command: str, **arguments: Any) -> None:
        """Send a command without waiting.

        Raises:
            ServerError: The process has ended.
        """
        try:
            self._connection.send({"command": command, **arguments})
        except OSError:
            raise self._error("has ended") from None

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """What it says to the last command.

        Raises:
            ServerError: It has ended, failed, or took too long.
        """
        try:
            if not self._connection.poll(timeout_s):
                raise self._error(f"did not answer within {timeout_s:.0f} s")
            answer: dict[str, Any] = self._connection.recv()
        except (EOFError, OSError):
            raise self._error("has ended") from None
        if "error" in answer:
            raise self._error(f"failed with {answer['error']}")
        return answer

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for the answer."""
        self.tell(command, **arguments)
        return self.answer()

    def request_stop(self) -> None:
        """Ask it to end; it may still be at work."""
        self._signal(signal.SIGTERM)

    def ensure_stopped(self) -> None:
        """Wait a little, then end it."""
        self._process.join(STOP_TIMEOUT_S)
        self._signal(signal.SIGKILL)
        self._process.join()
        self._connection.close()

    def _signal(self, number: signal.Signals) -> None:
        """To the process and to what it has started."""
        if self._process.pid is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        if self._process.is_alive():  # and leads no session yet
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def _error(self, what: str) -> ServerError:
        return log_error(f"the engine of {self.name!r} {what}", self.log)


class EngineGroup:
    """All engines; they are stopped together, whatever happens."""

    module: ClassVar[str] = MODULE

    def __init__(self) -> None:
        self.engines: dict[str, EngineProcess] = {}

    def __enter__(self) -> Self:
        """Begin with none."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop all; a second Ctrl-C cannot prevent it."""
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for engine in self.engines.values():
                engine.request_stop()
            for engine in self.engines.values():
                engine.ensure_stopped()
        finally:
            signal.signal(signal.SIGINT, previous)

    def start(
        self, name: str, arguments: Mapping[str, Any], log: Path
    ) -> EngineProcess:
        """Start a process and its engine, without waiting for its facts."""
        is_local = Path(arguments["model"]).is_dir()
        environ = engine_environ(os.environ, log.parent, is_local)
        engine = self.engines[name] = EngineProcess(name, log, environ, self.module)
        engine.tell("start", engine=dict(arguments))
        return engine

    def launch(
        self,
        name: str,
        config: Mapping[str, Any] | None,
        size: EngineSize,
        logs: Path,
        **arguments: Any,
    ) -> EngineProcess:
        """Start an engine of a size, without waiting for its facts.

        Args:
            name: Unique within the group.
            config: Speculative config; None without speculation.
            size: Model and room for requests.
            logs: Folder for what vLLM prints.
            **arguments: Of vLLM's ``EngineArgs``; they win.
        """
        usual = engine_arguments(size, config, bool(gpu_names()))
        log = logs / f"{name.replace(' ', '-')}.log"
        return self.start(name, usual | arguments, log)


def _start_process(
    log: Path, environ: Mapping[str, str], module: str
) -> tuple[BaseProcess, Connection]:
    """Start a process that obeys commands (``commands/commanded_engine.py``).

    Args:
        log: File for what it prints.
        environ: Its variables. What libraries read when they are imported they read
            from the variables of the first process.
        module: Has the function `obey`.

    Returns:
        The process, leader of a session of its own, and the pipe to it.
    """
    # What multiprocessing keeps on disk must outlive the folder of these engines.
    tempfile.gettempdir()
    context: ForkServerContext | SpawnContext
    if gpu_names():
        context = multiprocessing.get_context("spawn")
    else:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([NO_COLLECTION, module])
    ours, theirs = context.Pipe()
    process = context.Process(target=_obey, args=(theirs, log, dict(environ), module))
    with _variables(environ), _output_to(log.parent / IMPORTS_LOG):
        process.start()
    theirs.close()
    return process, ours


def _obey(
    connection: Connection, log: Path, environ: Mapping[str, str], module: str
) -> None:
    os.setsid()
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(environ)
    # Known since the imports; engines of a later group have a folder of their own.
    tempfile.tempdir = None
    engine = import_module(module)
    # An engine that starts collects garbage several times: not what the imports left.
    gc.freeze()
    gc.enable()
    engine.obey(connection)


@contextmanager
def _variables(environ: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Within: what this process starts prints into a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = os.dup(1), os.dup(2)
    with path.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    try:
        yield
    finally:
        for standard, saved in enumerate(before, start=1):
            os.dup2(saved, standard)
            os.close(saved)
