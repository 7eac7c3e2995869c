"""What a step costs the host: CPU time of the thread that feeds the device.

vLLM's engine schedules, learns and launches in one thread. A GPU that is done with a
step in 3 ms waits for it, so there what this thread does counts like arithmetic. Three
engines serve the same requests in short turns: one without speculation, vLLM's `mtp`
and `mtp_plus`, both bounded by the same K.

Result (JSON)::

    cells.<concurrency>.<contender>.schedule_us   CPU time of a decode step: spread
                                   .update_us     over the repeats
                                   .worker_us     on a CPU the model's arithmetic
                                   .over_mtp_us   schedule and update beyond those of
                                                  `mtp`, paired within a repeat
                                   .step_ms       median time of such a step
                                   .acceptance_length
    parts                   their names
    options, provenance
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.grid.cells import CODE
from benchmarks.grid.engines import BenchGroup
from benchmarks.off import MAX_CONCURRENCY, MAX_REPEATS, MAX_REQUEST_TOKENS
from benchmarks.options import DTYPES, check_numbers, check_output_folder, machine_slug
from benchmarks.small_group import play_repeats, room_for, start_engines
from benchmarks.spread import Spread
from examples.tiny_model import TINY_MODEL
from vllm_mtp.config import METHOD, VLLM_METHOD
from vllm_mtp.tools.engine_arguments import EngineSize
from vllm_mtp.tools.engine_process import NO_SPECULATION
from vllm_mtp.tools.option_checks import check_fields, check_name, resolve_model
from vllm_mtp.tools.provenance import collect_provenance, write_json
from vllm_mtp.tools.server_process import exit_on_signals, log_folder

PARTS = ("schedule", "update", "worker")
"""See ``engine.py``."""
MAX_DRAFT_LENGTH = 16

Figures = Mapping[str, Any]


@dataclass(frozen=True)
class HostOptions:
    """What the user chose.

    Attributes:
        model: Folder or hub name.
        draft_length: K of `mtp`, and the most that `mtp_plus` may draft.
        concurrencies: Requests at a time.
        request_tokens: Tokens of every request.
        dtype: Weights and arithmetic.
        num_repeats: Timed rounds of each engine and concurrency.
        output: Folder for the result.
    """

    model: str = str(TINY_MODEL)
    draft_length: int = 5
    concurrencies: tuple[int, ...] = (1, 32)
    request_tokens: int = 256
    dtype: str = "float32"
    num_repeats: int = 5
    output: Path = Path()

    def __post_init__(self) -> None:
        """Check every option.

        Raises:
            ConfigError: One of them has a value that is not allowed.
        """
        check_numbers("concurrency", self.concurrencies, (1, MAX_CONCURRENCY))
        check_name("dtype", self.dtype, DTYPES)
        check_fields(
            self,
            {
                "draft_length": (1, MAX_DRAFT_LENGTH),
                "request_tokens": (2, MAX_REQUEST_TOKENS),
                "num_repeats": (1, MAX_REPEATS),
            },
        )
        check_output_folder(self.output)

    @property
    def contenders(self) -> dict[str, dict[str, Any] | None]:
        """Speculative config by name."""
        bound = {"num_speculative_tokens": self.draft_length}
        return {
            NO_SPECULATION: None,
            VLLM_METHOD: {"method": VLLM_METHOD} | bound,
            METHOD: {"method": METHOD} | bound,
        }


def run_host_bench(options: HostOptions, console: Console) -> dict[str, Any]:
    """Measure, print and write.

    Args:
        options: What the user chose.
        console: Where to print.

    Returns:
        The result as it was written.

    Raises:
        ServerError: An engine failed.
    """
    most = max(options.concurrencies)
    cells = {}
    with log_folder() as logs, exit_on_signals(), BenchGroup() as group:
        size = EngineSize(
            resolve_model(options.model),
            room_for(options.request_tokens),
            most,
            options.dtype,
        )
        prompts = start_engines(group, options.contenders, size, logs)
        own = prompts.own[CODE]
        sampling = {"temperature": 0.0, "max_tokens": options.request_tokens}
        for concurrency in options.concurrencies:
            console.print(f"{concurrency} requests at a time", highlight=False)
            wave = [
                {"prompt": list(own[i % len(own)]), "sampling": sampling}
                for i in range(concurrency)
            ]
            cells[concurrency] = play_repeats(
                group, [wave], concurrency, options.num_repeats, console, timed="host"
            )
    result = summarise_host(options, cells)
    machine = machine_slug(result["provenance"]["hardware"])
    path = options.output / f"host-{machine}.json"
    write_json(path, result)
    print_host(result, console)
    console.print(f"Written: {path}", markup=False)
    return result


def summarise_host(
    options: HostOptions, cells: Mapping[int, Sequence[Mapping[str, Figures]]]
) -> dict[str, Any]:
    """The result, from what each engine counted in each round."""
    return {
        "cells": {
            str(concurrency): {
                name: _summarise(name, rounds) for name in options.contenders
            }
            for concurrency, rounds in cells.items()
        },
        "parts": PARTS,
        "options": asdict(options) | {"output": str(options.output)},
        "provenance": collect_provenance(sys.argv),
    }


def _summarise(name: str, rounds: Sequence[Mapping[str, Figures]]) -> dict[str, Any]:
    own = [each[name] for each in rounds]
    usual = [_scheduling_us(each[VLLM_METHOD]) for each in rounds]
    beyond = [_scheduling_us(a) - b for a, b in zip(own, usual, strict=True)]
    parts = {
        f"{part}_us": Spread.of([_part_us(each, part) for each in own]).as_json()
        for part in PARTS
    }
    tokens = sum(each["decode_tokens"] for each in own)
    step_ms = [1e3 * each["decode_seconds"] / each["decode_steps"] for each in own]
    return parts | {
        "over_mtp_us": Spread.of(beyond).as_json(),
        "step_ms": Spread.of(step_ms).median,
        "acceptance_length": tokens / sum(e["decode_request_steps"] for e in own),
    }


def _part_us(figures: Figures, part: str) -> float:
    seconds: float = figures["decode_split_seconds"][part]
    return 1e6 * seconds / float(figures["decode_steps"])


def _scheduling_us(figures: Figures) -> float:
    return _part_us(figures, "schedule") + _part_us(figures, "update")


def print_host(result: Mapping[str, Any], console: Console) -> None:
    """A line for each contender and concurrency."""
    table = Table(
        title="CPU time of the engine's thread, microseconds a decode step",
        box=box.SIMPLE_HEAVY,
        pad_edge=False,
    )
    columns = ("requests", "engine", *PARTS, "beyond mtp", "step ms", "tokens")
    for column in columns:
        justify: Literal["left", "right"] = "left" if column == "engine" else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    for concurrency, cell in result["cells"].items():
        for name, each in cell.items():
            beyond = each["over_mtp_us"]
            table.add_row(
                concurrency,
                name,
                *(f"{each[f'{part}_us']['median']:.0f}" for part in PARTS),
                f"{beyond['median']:+.0f}",
                f"{each['step_ms']:.2f}",
                f"{each['acceptance_length']:.2f}",
            )
    console.print(table)
    console.print(
        "worker: where the model runs on the CPU, its arithmetic; on a GPU what it "
        "takes to launch it. Scheduling comes on top of it in every step that the "
        "device does not outlast.",
        highlight=False,
    )
