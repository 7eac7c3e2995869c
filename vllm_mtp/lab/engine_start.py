"""Processes of engines, forked from one that has imported vLLM already.

Importing vLLM takes 10 to 20 s of a core, engines of a benchmark on CPUs share few, and
there are twelve in a grid. The process they are forked from imports and does nothing
else: no thread of a library runs in it. Machines with a GPU have more cores, and
drivers that had better not be forked: there each process imports for itself.
"""

import gc
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from vllm_mtp.lab.provenance import gpu_names

MODULE = "vllm_mtp.integration.bench_engine"
IMPORTS_LOG = "imports.log"
"""What vLLM prints when it is imported, beside the logs of engines."""


def start_engine_process(
    log: Path, environ: Mapping[str, str]
) -> tuple[BaseProcess, Connection]:
    """Start a process that obeys commands; see ``integration/bench_engine.py``.

    Args:
        log: File for what it prints.
        environ: Its variables. What libraries read when they are imported they read
            from the variables of the first process.

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
        context.set_forkserver_preload([MODULE])
    ours, theirs = context.Pipe()
    process = context.Process(target=_obey, args=(theirs, log, dict(environ)))
    with _variables(environ), _output_to(log.parent / IMPORTS_LOG):
        process.start()
    theirs.close()
    return process, ours


def _obey(connection: Connection, log: Path, environ: Mapping[str, str]) -> None:
    os.setsid()
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(environ)
    # Known since the imports; engines of a later group have a folder of their own.
    tempfile.tempdir = None
    bench_engine = import_module(MODULE)
    # An engine that starts collects garbage six times, each 0.6 s on a slow core if it
    # goes through all that the imports left.
    gc.freeze()
    bench_engine.obey(connection)


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
