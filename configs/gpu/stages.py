"""What to run on a GPU that is lent for some minutes: the most valuable first.

Each stage is a command of ``configs/gpu/run`` or of its own, has a folder for what it
writes, and leaves ``stage.json`` there when it ends. A stage that an earlier run has
finished is skipped; none begins that is not expected to end in time.

    configs/gpu/run stages --minutes 9 --output FOLDER [--only NAME ...]
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MODEL_OPTIONS = (
    *("--hidden-size", "2048", "--num-hidden-layers", "24"),
    *("--intermediate-size", "8192", "--vocab-size", "152064"),
)
"""2 billion parameters, and the vocabulary of MiMo-7B."""
MARGIN_S = 20.0
"""Kept at the end, for what was written to be sent back."""


class Stage(NamedTuple):
    """A command, and how long it is expected to take."""

    name: str
    seconds: float
    command: tuple[str, ...]


class Ended(NamedTuple):
    """What became of a stage; the fields of ``stage.json``."""

    name: str
    seconds: float
    returncode: int | None
    """None where it ran out of time."""


def bench(name: str, *options: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "benchmarks", name, *options)


def stages(model: Path, output: Path) -> list[Stage]:
    """All of them, in their order."""
    run = str(ROOT / "configs" / "gpu" / "run")
    served = ("--model", str(model), "--dtype", "bfloat16")

    def into(name: str) -> tuple[str, str]:
        return "--output", str(output / name)

    grid = (
        *served,
        *("--workload", "code,phases", "--context", "short"),
        *("--draft-lengths", "1,3,5", "--repeats", "2", "--max-repeats", "2"),
        *("--settle-seconds", "3"),
    )
    return [
        Stage("kernels", 60, (run, "kernels", "-q")),
        Stage("engines", 150, (run, "engines", "-q")),
        Stage(
            "off",
            150,
            bench(
                "off",
                *served,
                *("--concurrency", "1,32,256", "--repeats", "5"),
                *into("off"),
            ),
        ),
        *(
            Stage(
                f"launches-{length}",
                70,
                bench(
                    "launches",
                    *served,
                    *("--draft-length", length),
                    *into(f"launches-{length}"),
                ),
            )
            for length in ("0", "3")
        ),
        Stage(
            "grid-small",
            170,
            bench("grid", *grid, "--concurrency", "1,32", *into("grid-small")),
        ),
        Stage(
            "grid-large",
            120,
            bench("grid", *grid, "--concurrency", "128", *into("grid-large")),
        ),
        Stage("rollback", 60, bench("rollback", *into("rollback"))),
    ]


def make_model(folder: Path) -> None:
    """The model that is served, unless it is there."""
    if not (folder / "config.json").exists():
        tiny = ROOT / "examples" / "tiny_model" / "mimo-python"
        command = (sys.executable, "-m", "examples.tiny_model", "expand", str(tiny))
        subprocess.run((*command, str(folder), *MODEL_OPTIONS), cwd=ROOT, check=True)


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
    ended = []
    for stage in wanted:
        folder = output / stage.name
        if _is_done(folder):
            print(f"{stage.name}: done before", flush=True)
            continue
        left = deadline - clock()
        if left < stage.seconds:
            print(f"{stage.name}: {stage.seconds:.0f} s, {left:.0f} left", flush=True)
            continue
        folder.mkdir(parents=True, exist_ok=True)
        ended.append(_run(stage, folder, left))
        print(ended[-1], flush=True)
    return ended


def _is_done(folder: Path) -> bool:
    note = folder / "stage.json"
    return note.exists() and json.loads(note.read_text())["returncode"] == 0


def _run(stage: Stage, folder: Path, most_s: float) -> Ended:
    began_at = time.monotonic()
    with (folder / "log").open("w") as log:
        try:
            found = subprocess.run(
                stage.command,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=most_s,
                check=False,
            )
            returncode: int | None = found.returncode
        except subprocess.TimeoutExpired:
            returncode = None
    result = Ended(stage.name, time.monotonic() - began_at, returncode)
    (folder / "stage.json").write_text(json.dumps(result._asdict()))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="made in the output, if unset")
    parser.add_argument("--only", nargs="*", metavar="NAME", default=())
    options = parser.parse_args()
    output = options.output.resolve()
    model = options.model or output / "model"
    all_stages = stages(model.resolve(), output)
    only: Collection[str] = options.only or [stage.name for stage in all_stages]
    unknown = set(only) - {stage.name for stage in all_stages}
    if unknown:
        names = ", ".join(stage.name for stage in all_stages)
        parser.error(f"--only {' '.join(sorted(unknown))}: must be of {names}")
    output.mkdir(parents=True, exist_ok=True)
    began_at = time.monotonic()
    if options.model is None:
        make_model(model)
    spent = (time.monotonic() - began_at) / 60.0
    wanted = [stage for stage in all_stages if stage.name in only]
    ended = run_stages(wanted, output, options.minutes - spent)
    return 0 if all(each.returncode == 0 for each in ended) else 1


if __name__ == "__main__":
    sys.exit(main())
