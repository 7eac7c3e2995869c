"""Two checkouts of this project side by side: whether a change made it slower.

`mtp_plus` of this checkout and of another one, each twice, and an engine without
speculation serve the requests of the grid's cells in short turns. Each engine is a
process of its own checkout's environment, so all starts are alike; equal processes
differ by up to 4 % as long as they live, so a checkout's speed is the mean of its two.

Result (JSON)::

    cells.<name>.after_over_before   paired ratios of decode speed, this checkout to
                                     the other one
                .over_none           of each, to no speculation
    overall                          geometric mean of the medians, and the interval
                                     that holds 95 % of it, over resampled cells
    identical_texts, options, provenance
"""

import os
import signal
import statistics
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from benchmarks.grid.cells import (
    Cell,
    Prompts,
    make_warm_up_waves,
    make_waves,
    plan_cells,
)
from benchmarks.grid.engines import cut_prompts, play_together
from benchmarks.grid.options import WORKLOADS, GridOptions
from benchmarks.harness import Measurement, Rounds, full_speed, ratio_row, spread_of
from benchmarks.spread import Spread, resampled_interval
from vllm_mtp.config import METHOD
from vllm_mtp.tools.engine_arguments import (
    EngineSize,
    engine_arguments,
    engine_environ,
)
from vllm_mtp.tools.engine_process import (
    NO_SPECULATION,
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    EngineGroup,
    EngineProcess,
)
from vllm_mtp.tools.option_checks import refuse, resolve_model
from vllm_mtp.tools.options import option, required
from vllm_mtp.tools.provenance import gpu_names
from vllm_mtp.tools.server_process import exit_on_signals, log_folder

HERE = Path(__file__).resolve().parents[1]
AFTER, BEFORE = "after", "before"
MAX_MODEL_LEN = 512

_OBEY = """
import sys
from multiprocessing.connection import Connection
from benchmarks.engine import obey
obey(Connection(int(sys.argv[1])))
"""


class CheckoutEngine(EngineProcess):
    """An engine of a checkout, in its own environment."""

    def __init__(
        self, name: str, log: Path, environ: Mapping[str, str], folder: Path
    ) -> None:
        """Start the process; its engine is not started yet."""
        self.name, self.log = name, log
        self._connection, theirs = Pipe()
        command = [_python(folder), "-c", _OBEY, str(theirs.fileno())]
        with log.open("wb") as output:
            self._own = subprocess.Popen(
                command,
                cwd=folder,
                env=dict(environ),
                pass_fds=[theirs.fileno()],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        theirs.close()

    def request_stop(self) -> None:
        """Ask it to end; it may still be at work."""
        with suppress(ProcessLookupError):
            os.killpg(self._own.pid, signal.SIGTERM)

    def ensure_stopped(self) -> None:
        """Wait a little, then end it."""
        with suppress(subprocess.TimeoutExpired):
            self._own.wait(STOP_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(self._own.pid, signal.SIGKILL)
        self._own.wait()
        self._connection.close()


def _python(folder: Path) -> str:
    """The interpreter of a checkout's environment, which is set up if need be."""
    command = ["make", "--silent", "setup", "python"]
    found = subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True
    )
    return found.stdout.split()[-1]


@dataclass(frozen=True, kw_only=True)
class CheckoutsBench(Measurement):
    """Compare mtp_plus of this checkout with that of another one."""

    command: ClassVar[str] = "checkouts"

    other: Path = required("Folder with the other checkout: a git worktree.")
    workloads: tuple[str, ...] = option(tuple(WORKLOADS), "As of grid.")
    concurrency: tuple[int, ...] = option((1, 4, 16), "Requests at a time.", 1, 256)
    temperatures: tuple[float, ...] = option((0.0, 1.0), "Of sampling.", 0, 2)
    settle_seconds: float = option(
        10.0, "How long each cell is served before it is timed.", 0.0, 600.0
    )
    round_seconds: float = option(1.2, "As of grid.", 0.01, 600.0)
    repeats: int = option(2, "Timed rounds of each engine.", 1, 100)
    dtype: str = option("float32", "Greedy texts of all engines agree in float32 only.")

    def __post_init__(self) -> None:
        """Check every option; see `Options`."""
        super().__post_init__()
        if not (self.other / "benchmarks" / "engine.py").is_file():
            refuse("other", str(self.other), "a folder with a checkout of this project")

    @property
    def contenders(self) -> dict[str, Path | None]:
        """Checkout of each engine; None without speculation."""
        return {
            NO_SPECULATION: None,
            BEFORE: self.other,
            AFTER: HERE,
            f"{AFTER} again": HERE,
            f"{BEFORE} again": self.other,
        }

    @property
    def grid(self) -> GridOptions:
        """What the grid's own helpers ask for."""
        return GridOptions(
            workloads=self.workloads,
            concurrencies=self.concurrency,
            temperatures=self.temperatures,
            contexts=("short",),
            output=self.output,
        )

    @property
    def cells(self) -> list[Cell]:
        """In the order in which they are measured."""
        return plan_cells(self.grid)

    def measure(self, console: Console) -> dict[str, Any]:
        """Start all engines, play all cells, summarise.

        Raises:
            ServerError: An engine failed.
        """
        played: dict[str, Rounds] = {}
        with log_folder() as logs, exit_on_signals(), EngineGroup() as group:
            prompts = self._start(group, logs)
            for number, cell in enumerate(self.cells):
                rounds = played[cell.name] = self._play(group, cell, prompts, number)
                ratio = _checkout(rounds, AFTER), _checkout(rounds, BEFORE)
                median = Spread.of_ratio(*ratio).median
                console.print(f"{cell.name}: {median:.3f}", highlight=False)
        return self.summarise(played)

    def _start(self, group: EngineGroup, logs: Path) -> Prompts:
        size = EngineSize(
            resolve_model(self.model), MAX_MODEL_LEN, max(self.concurrency), self.dtype
        )
        on_gpu = bool(gpu_names())
        environ = engine_environ(os.environ, logs, Path(size.model).is_dir())
        for name, folder in self.contenders.items():
            config = {"method": METHOD} if folder else None
            log = logs / f"{name.replace(' ', '-')}.log"
            engine = CheckoutEngine(name, log, environ, folder or HERE)
            group.engines[name] = engine
            engine.tell("start", engine=engine_arguments(size, config, on_gpu))
        facts = [each.answer(START_TIMEOUT_S) for each in group.engines.values()]
        first = group.engines[NO_SPECULATION]
        return cut_prompts(first, facts[0]["vocab_size"], self.grid)

    def _play(
        self, group: EngineGroup, cell: Cell, prompts: Prompts, number: int
    ) -> Rounds:
        """Rounds of a cell after a calibration and until controllers have settled."""
        warm_up = make_warm_up_waves(cell, prompts)
        names, concurrency = list(self.contenders), cell.concurrency
        play_together(group, names, warm_up, concurrency)
        none = group.engines[NO_SPECULATION]
        figures = none.ask("round", waves=warm_up, concurrency=concurrency)
        tokens = cell.request_tokens(full_speed(figures), self.round_seconds)
        settled_s, round_number = 0.0, self.repeats + 1
        while settled_s < self.settle_seconds:
            waves = make_waves(cell, prompts, tokens, round_number)
            played = play_together(group, names[1:], waves, concurrency)
            settled_s += min(each["seconds"] for each in played.values())
            round_number += 1
        rounds = []
        for repeat in range(self.repeats):
            shift = (number + repeat) % len(names)
            in_turn = [*names[shift:], *names[:shift]]
            waves = make_waves(cell, prompts, tokens, repeat + 1)
            rounds.append(play_together(group, in_turn, waves, concurrency))
        return rounds

    def summarise(self, played: Mapping[str, Rounds]) -> dict[str, Any]:
        """See the top of this file."""
        cells = {name: _summarise_cell(rounds) for name, rounds in played.items()}
        medians = [each["after_over_before"]["median"] for each in cells.values()]
        greedy = [cell.name for cell in self.cells if not cell.temperature]
        return {
            "axes": [asdict(cell) for cell in self.cells],
            "cells": cells,
            "overall": {
                "geometric_mean": statistics.geometric_mean(medians),
                "interval": resampled_interval(medians),
            },
            "identical_texts": all(
                len({each["texts_sha256"] for each in repeat.values()}) == 1
                for name in greedy
                for repeat in played[name]
            ),
        }

    @staticmethod
    def show(result: Mapping[str, Any], console: Console) -> None:
        """A line for each cell, and the mean."""
        table = Table(title="This checkout, of the other one")
        for column in ("cell", "ratio", "quartiles", "before/none", "after/none"):
            table.add_column(column, justify="right")
        for name, cell in result["cells"].items():
            table.add_row(
                name,
                *ratio_row(cell["after_over_before"]),
                *(f"{cell['over_none'][which]:.3f}" for which in (BEFORE, AFTER)),
            )
        console.print(table)
        overall = result["overall"]
        low, high = overall["interval"]
        console.print(
            f"Geometric mean {overall['geometric_mean']:.3f} ({low:.3f}..{high:.3f})"
        )


def _checkout(rounds: Rounds, name: str) -> Spread:
    """Decode speed of a checkout: of its two engines."""
    both = (spread_of(rounds, each, full_speed) for each in (name, f"{name} again"))
    return Spread.of_geometric_mean(*both)


def _summarise_cell(rounds: Rounds) -> dict[str, Any]:
    before, after = _checkout(rounds, BEFORE), _checkout(rounds, AFTER)
    none = spread_of(rounds, NO_SPECULATION, full_speed)
    return {
        "after_over_before": Spread.of_ratio(after, before).as_json(),
        "over_none": {
            BEFORE: Spread.of_ratio(before, none).median,
            AFTER: Spread.of_ratio(after, none).median,
        },
    }
