"""What to run on a GPU that is lent for some minutes: the most valuable first.

Each stage is a command, has a folder for what it writes (its log, its results, the logs
of engines that failed), and leaves ``stage.json`` there when it ends. A stage that an
earlier run has finished is skipped; none begins that is not expected to end in time.

    configs/gpu/run stages --minutes 9 --output FOLDER --model MODEL [--only NAME ...]

========  =====================================================  ======================
stage     what it says                                           expected
========  =====================================================  ======================
kernels   the kernels against the reference                      90 s, all three
engines   greedy tokens and scrubbed slots, graphs and eager     together
model     (makes 2 billion parameters)
costs     graphs, K = 0, launches of a step: four engines        240 s
grid      code and phases, greedy and sampled, at 1, 32 and 128  170 s for the first
          requests, against K = 1, 3 and 5: seven engines        cells, 450 s for all
rollback  the rollback kernels beside vLLM's chain               60 s
repeater  (makes a small model that repeats its prompt)
copying   drafts continued from contexts, and without            120 s
========  =====================================================  ======================

The first nine minutes hold all before the grid, and its first cells or the rollback;
the next nine, with the same folders, all of the grid: it goes on from its journal.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MODEL_OPTIONS = (
    *("--hidden-size", "2048", "--num-hidden-layers", "24"),
    *("--intermediate-size", "8192", "--vocab-size", "152064"),
)
"""2 billion parameters, and the vocabulary of MiMo-7B. A token takes 100 KiB of KV
cache: prompts and answers are so short that all engines of a stage fit into 80 GB."""
MARGIN_S = 20.0
"""Kept at the end, for what was written to be sent back."""
PATIENCE = 3.0
"""Times what a stage should take, after which it hangs; the grid may take all there
is."""
STOP_S = 10.0
"""For a stage to end its engines, before it is killed."""


class Stage(NamedTuple):
    """A command, and how long it is expected to take."""

    name: str
    seconds: float
    command: tuple[str, ...]
    is_beside: bool = False
    """Whether it runs together with the stage before: neither measures time."""
    product: Path | None = None
    """What it makes, if it is done where that is."""


class Ended(NamedTuple):
    """What became of a stage; the fields of ``stage.json``."""

    name: str
    seconds: float
    returncode: int | None
    """None where it ran out of time."""


def stages(model: Path, output: Path) -> list[Stage]:
    """All of them, in their order."""

    def bench(name: str, *options: str) -> tuple[str, ...]:
        command = (sys.executable, "-m", "benchmarks", name, *options)
        return (*command, "--output", str(output / name))

    def tests(*options: str) -> tuple[str, ...]:
        # As configs/gpu/run has them, which has built the package by now.
        plain = ("-o", "addopts=", "-ra", "-q", "-p", "no:cacheprovider", "-m", "gpu")
        return (sys.executable, "-m", "pytest", *plain, *options)

    served = ("--model", str(model), "--dtype", "bfloat16")
    gpu_tests = [f"tests/e2e/test_{name}_gpu.py" for name in ("greedy", "scrub")]
    tiny = ROOT / "examples" / "tiny_model" / "mimo-python"
    repeater = str(output / "repeating-model")
    expand = (sys.executable, "-m", "examples.tiny_model", "expand", str(tiny))
    return [
        Stage("kernels", 60, tests("tests/kernels")),
        Stage("engines", 90, tests("-n", "4", *gpu_tests), is_beside=True),
        Stage(
            "model",
            60,
            (*expand, str(model), *MODEL_OPTIONS),
            is_beside=True,
            product=model / "PROVENANCE.json",  # written last
        ),
        Stage(
            "costs",
            240,
            bench(
                "costs",
                *served,
                *("--concurrency", "1,32,256", "--repeats", "7"),
                *("--request-tokens", "44"),
            ),
        ),
        Stage(
            "grid",
            170,
            bench(
                "grid",
                *served,
                *("--workload", "code,phases", "--context", "short"),
                *("--concurrency", "1,32,128", "--temperature", "0,1"),
                *("--draft-lengths", "1,3,5", "--repeats", "2", "--max-repeats", "2"),
                *("--round-seconds", "0.6", "--settle-seconds", "3"),
                *("--kv-cache-mib", "2560"),
            ),
        ),
        Stage("rollback", 60, bench("rollback")),
        Stage(
            "repeater",
            30,
            (
                sys.executable,
                "-m",
                "examples.tiny_model",
                "copying",
                str(tiny),
                repeater,
            ),
            product=output / "repeating-model" / "model.safetensors",
        ),
        Stage(
            "copying",
            120,
            bench(
                "copying",
                *(
                    "--model",
                    repeater,
                    "--dtype",
                    "bfloat16",
                    "--max-model-len",
                    "2048",
                ),
                *("--concurrency", "1,16", "--loads", "edits"),
            ),
        ),
    ]


def run_stages(
    wanted: Iterable[Stage],
    output: Path,
    minutes: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[Ended]:
    """Run what fits.

    Args:
        wanted: Most valuable first.
        output: Has a folder for each.
        minutes: For all of them.
        clock: Seconds.

    Returns:
        Those that ran now, in order.
    """
    deadline = clock() + 60.0 * minutes - MARGIN_S
    ended: list[Ended] = []
    for group in _groups(wanted):
        todo = []
        for stage in group:
            left = deadline - clock()
            if _is_done(stage, output):
                print(f"{stage.name}: done before", flush=True)
            elif left < stage.seconds:
                print(f"{stage.name}: {stage.seconds:.0f} s, {left:.0f} left")
            else:
                todo.append((stage, output / stage.name, left))
        with ThreadPoolExecutor(len(group)) as pool:
            for found in pool.map(lambda each: _run(*each), todo):
                print(found, flush=True)
                ended.append(found)
    return ended


def _groups(wanted: Iterable[Stage]) -> Iterator[list[Stage]]:
    """Stages that run together."""
    group: list[Stage] = []
    for stage in wanted:
        if group and not stage.is_beside:
            yield group
            group = []
        group.append(stage)
    if group:
        yield group


def _is_done(stage: Stage, output: Path) -> bool:
    if stage.product is not None:
        return stage.product.exists()
    note = output / stage.name / "stage.json"
    return note.exists() and json.loads(note.read_text())["returncode"] == 0


def _run(stage: Stage, folder: Path, most_s: float) -> Ended:
    folder.mkdir(parents=True, exist_ok=True)
    began_at = time.monotonic()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            stage.command,
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(folder)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        returncode: int | None = None
        with suppress(subprocess.TimeoutExpired):
            returncode = process.wait(min(most_s, PATIENCE * stage.seconds))
        if returncode is None:
            _stop(process)
    result = Ended(stage.name, time.monotonic() - began_at, returncode)
    (folder / "stage.json").write_text(json.dumps(result._asdict()))
    return result


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started."""
    os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="made if it is not there")
    parser.add_argument("--only", nargs="*", metavar="NAME", default=())
    options = parser.parse_args()
    output = options.output.resolve()
    model = (options.model or output / "model").resolve()
    all_stages = stages(model, output)
    only: Collection[str] = options.only or [stage.name for stage in all_stages]
    unknown = set(only) - {stage.name for stage in all_stages}
    if unknown:
        names = ", ".join(stage.name for stage in all_stages)
        parser.error(f"--only {' '.join(sorted(unknown))}: must be of {names}")
    wanted = [each for each in all_stages if each.name in only or each.product]
    ended = run_stages(wanted, output, options.minutes)
    return 0 if all(each.returncode == 0 for each in ended) else 1


if __name__ == "__main__":
    sys.exit(main())
