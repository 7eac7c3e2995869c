"""With this folder on ``PYTHONPATH`` servers fork their engines instead of spawning.

On a CPU vLLM has each of a server's processes import all of it again, ten seconds of a
core. Python imports a module of this name when it starts. A server that is started as
everybody's is in ``tests/e2e/test_serve.py``.

And garbage is not collected while vLLM is imported: there is hardly any, and looking
for it takes a fifth of the time.
"""

import gc
import multiprocessing
import sys
from multiprocessing.context import BaseContext

_get_context = multiprocessing.get_context


def _get_forking_context(method: str | None = None) -> BaseContext:
    if method != "spawn":
        return _get_context(method)
    gc.enable()  # an engine starts: all is imported
    return _get_context("fork" if _may_fork() else method)


def _may_fork() -> bool:
    """Not within a worker of Ray, whose threads would be missing."""
    ray = sys.modules.get("ray")
    return ray is None or not ray.is_initialized()


gc.disable()
multiprocessing.get_context = _get_forking_context
