"""A process that prepares once and then forks for each order.

For what takes long to import and what changes its process for good. It is started with
the first order and ends with the process that gives them.

``python -m tests.support.fork_server PREPARE`` is such a process; its orders come,
one JSON value a line, through the socket that is its standard input, and the exit
status of each goes back the same way.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class ForkServer:
    """Gives orders to such a process."""

    def __init__(self, prepare: str) -> None:
        """Nothing is started yet.

        Args:
            prepare: ``module:function``, called once, without arguments.
        """
        self._prepare = prepare
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def run(self, obey: str, order: Any, log: Path, timeout_s: float) -> None:
        """Have an order obeyed.

        Args:
            obey: ``module:function``, called with the order in a process of its own.
            order: What JSON can hold.
            log: File for what is printed meanwhile.
            timeout_s: Until all of its processes are killed.

        Raises:
            AssertionError: It failed.
            TimeoutError: It took too long.
        """
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._socket is not None
        self._socket.settimeout(timeout_s)
        message = {"obey": obey, "order": order, "log": str(log)}
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
            status = self._socket.recv(16)
        except BaseException:
            self._kill()
            raise
        assert status == b"0\n", log.read_text()[-4000:] if log.exists() else status

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, self._prepare],
                stdin=theirs,
                cwd=ROOT,
                start_new_session=True,
            )

    def _kill(self) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _serve(prepare: str) -> None:
    # Imports leave hardly any garbage, and looking for it takes a fifth of their time.
    gc.disable()
    _function(prepare)()
    orders = socket.socket(fileno=0)
    for line in orders.makefile():
        message = json.loads(line)
        child = os.fork()
        if not child:
            gc.enable()
            function = _function(message["obey"])
            os._exit(_obey(function, message["order"], message["log"]))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        orders.sendall(b"%d\n" % status)


def _obey(function: Any, order: Any, log: str) -> int:
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        function(order)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _function(name: str) -> Any:
    module, function = name.split(":")
    return getattr(import_module(module), function)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
