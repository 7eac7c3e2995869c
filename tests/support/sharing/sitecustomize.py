"""With this folder on ``PYTHONPATH`` commands fork engines from a server of tests.

On a CPU each command has a process that imports vLLM, eight seconds of a core, to fork
its engines from. Here that process is the one of `tests/support/shared_engines.py`, and
all else is as ever. Python imports a module of this name when it starts. A command with
a process of its own is interrupted in ``tests/integration/test_bench_grid.py``.
"""

import os
from multiprocessing import forkserver, resource_tracker

_address = os.environ.get("MTP_PLUS_TESTS_FORK_SERVER")
if _address:
    _server = forkserver._forkserver
    _server._forkserver_address = _address
    # Keeps servers alive, which this one needs not.
    _server._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)
    _server.ensure_running = resource_tracker.ensure_running
