"""Commands in processes of their own whose engines need not import vLLM again."""

import multiprocessing
import os
from collections.abc import Mapping
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from tempfile import gettempdir

from vllm_mtp.tools.engine_arguments import engine_environ
from vllm_mtp.tools.engine_process import (
    MODULE,
    NO_COLLECTION,
    _output_to,
    _variables,
)
from vllm_mtp.tools.provenance import gpu_names

VARIABLE = "MTP_PLUS_TESTS_FORK_SERVER"
FOLDER = Path(__file__).with_name("sharing")


def sharing_engines(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of a command that forks its engines from this process's fork server.

    Where there is a GPU engines are not forked, and nothing changes.
    """
    if gpu_names():
        return dict(environ)
    paths = filter(None, [str(FOLDER), environ.get("PYTHONPATH")])
    return {**environ, "PYTHONPATH": os.pathsep.join(paths), VARIABLE: _fork_server()}


@cache
def _fork_server() -> str:
    """Address of the server that commands in this very process use, too."""
    scratch = Path(gettempdir())
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([NO_COLLECTION, MODULE])
    environ = engine_environ(os.environ, scratch, local_model=True)
    with _variables(environ), _output_to(Path(os.devnull)):
        forkserver.ensure_running()
    return str(forkserver._forkserver._forkserver_address)
