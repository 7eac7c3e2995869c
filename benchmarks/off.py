"""What `mtp_plus` costs while it does not draft: every request pinned to K = 0.

Three engines serve the same requests in short turns: one without speculation,
the same once more, and `mtp_plus` with K = 0 pinned by the request. How far the two
alike ones are apart says what this machine can tell.

Result (JSON)::

    cells.<concurrency>.over_none    paired ratios of decode speed, `mtp_plus` to the
                                     geometric mean of the two without speculation
                       .none_again   the second one to the first
                       .step_ms      median step time of each engine
    identical_texts         greedy only, else null
    options, provenance
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.grid.cells import CODE, Prompts
from benchmarks.grid.engines import BenchGroup
from benchmarks.options import (
    AGAIN,
    DTYPES,
    check_numbers,
    check_output_folder,
    machine_slug,
)
from benchmarks.small_group import play_repeats, room_for, start_engines
from benchmarks.spread import Spread
from examples.tiny_model import TINY_MODEL
from vllm_mtp.config import METHOD
from vllm_mtp.tools.engine_arguments import EngineSize
from vllm_mtp.tools.engine_process import NO_SPECULATION
from vllm_mtp.tools.option_checks import check_fields, check_name, resolve_model
from vllm_mtp.tools.provenance import collect_provenance, write_json
from vllm_mtp.tools.server_process import exit_on_signals, log_folder

CONTENDERS: dict[str, dict[str, Any] | None] = {
    NO_SPECULATION: None,
    AGAIN: None,
    METHOD: {"method": METHOD},
}
MAX_CONCURRENCY = 256
MAX_REQUEST_TOKENS = 512
MAX_REPEATS = 100
MAX_TEMPERATURE = 2.0

Round = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class OffOptions:
    """What the user chose.

    Attributes:
        model: Folder or hub name.
        concurrencies: Requests at a time.
        request_tokens: Tokens of every request.
        temperature: Of sampling; 0 is greedy.
        dtype: Weights and arithmetic.
        num_repeats: Timed rounds of each engine and concurrency.
        output: Folder for the result.
    """

    model: str = str(TINY_MODEL)
    concurrencies: tuple[int, ...] = (1, 16)
    request_tokens: int = 128
    temperature: float = 0.0
    dtype: str = "float32"
    num_repeats: int = 7
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
                "request_tokens": (2, MAX_REQUEST_TOKENS),
                "temperature": (0, MAX_TEMPERATURE),
                "num_repeats": (1, MAX_REPEATS),
            },
        )
        check_output_folder(self.output)


def run_off_bench(options: OffOptions, console: Console) -> dict[str, Any]:
    """Measure, print and write.

    Args:
        options: What the user chose.
        console: Where to print.

    Returns:
        The result as it was written.

    Raises:
        ServerError: An engine failed.
    """
    model = resolve_model(options.model)
    most = max(options.concurrencies)
    cells = {}
    with log_folder() as logs, exit_on_signals(), BenchGroup() as group:
        longest = room_for(options.request_tokens)
        size = EngineSize(model, longest, most, options.dtype)
        prompts = start_engines(group, CONTENDERS, size, logs)
        for concurrency in options.concurrencies:
            console.print(f"{concurrency} requests at a time", highlight=False)
            wave = pinned_wave(prompts, concurrency, options)
            cells[concurrency] = play_repeats(
                group, [wave], concurrency, options.num_repeats, console
            )
    result = summarise_off(options, cells)
    machine = machine_slug(result["provenance"]["hardware"])
    path = options.output / f"off-{machine}.json"
    write_json(path, result)
    print_off(result, console)
    console.print(f"Written: {path}", markup=False)
    return result


def pinned_wave(
    prompts: Prompts, concurrency: int, options: OffOptions
) -> list[dict[str, Any]]:
    """Requests whose K is pinned to 0; engines without speculation do not care."""
    own = prompts.own[CODE]
    sampling = {
        "temperature": options.temperature,
        "max_tokens": options.request_tokens,
        "extra_args": {METHOD: {"k": 0}},
    }
    return [
        {"prompt": list(own[i % len(own)]), "sampling": sampling}
        for i in range(concurrency)
    ]


def summarise_off(
    options: OffOptions, cells: Mapping[int, Sequence[Round]]
) -> dict[str, Any]:
    """The result, from what each engine counted in each round."""
    texts_agree = all(
        len({figures["texts_sha256"] for figures in each.values()}) == 1
        for rounds in cells.values()
        for each in rounds
    )
    return {
        "cells": {
            str(concurrency): _summarise_cell(rounds)
            for concurrency, rounds in cells.items()
        },
        "identical_texts": None if options.temperature else texts_agree,
        "options": asdict(options) | {"output": str(options.output)},
        "provenance": collect_provenance(sys.argv),
    }


def print_off(result: Mapping[str, Any], console: Console) -> None:
    """A line for each concurrency."""
    table = Table(title="K pinned to 0, of an engine without speculation")
    for column in ("requests", "mtp_plus", "quartiles", "none again", "ms a step"):
        table.add_column(column, justify="right")
    for concurrency, cell in result["cells"].items():
        ratio, again = cell["over_none"], cell["none_again"]
        table.add_row(
            concurrency,
            f"{ratio['median']:.3f}",
            "{:.3f}..{:.3f}".format(*ratio["quartiles"]),
            f"{again['median']:.3f}",
            f"{cell['step_ms'][NO_SPECULATION]:.1f}",
        )
    console.print(table)
    if result["identical_texts"] is not None:
        same = "the same" if result["identical_texts"] else "DIFFERENT"
        console.print(f"Greedy texts: {same} from all engines")


def _summarise_cell(rounds: Sequence[Round]) -> dict[str, Any]:
    speeds = {name: [_speed(each[name]) for each in rounds] for name in CONTENDERS}
    none, again = Spread.of(speeds[NO_SPECULATION]), Spread.of(speeds[AGAIN])
    mean = Spread.of_geometric_mean(none, again)
    return {
        "over_none": Spread.of_ratio(Spread.of(speeds[METHOD]), mean).as_json(),
        "none_again": Spread.of_ratio(again, none).as_json(),
        "step_ms": {
            name: Spread.of([_step_ms(each[name]) for each in rounds]).median
            for name in CONTENDERS
        },
    }


def _speed(figures: Mapping[str, Any]) -> float:
    return float(figures["full_tokens"] / figures["full_seconds"])


def _step_ms(figures: Mapping[str, Any]) -> float:
    return float(1e3 * figures["full_seconds"] / figures["full_steps"])
