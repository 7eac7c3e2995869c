"""What `mtp_plus` costs while it does not draft: every request pinned to K = 0.

Three engines serve the same requests in turns: one without speculation, the same once
more, and `mtp_plus` with K = 0 pinned by the request. How far the two alike ones are
apart says what this machine can tell.

Result (JSON)::

    cells.<concurrency>.over_none    paired ratios of decode speed, `mtp_plus` to the
                                     geometric mean of the two without speculation
                       .none_again   the second one to the first
                       .step_ms      median step time of each engine
    identical_texts         greedy only, else null
    options, provenance
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from benchmarks.grid.cells import Prompts
from benchmarks.harness import (
    Bench,
    Contenders,
    Rounds,
    Waves,
    full_speed,
    full_step_ms,
    ratio_row,
    same_wave,
    say_texts,
    spread_of,
    texts_agree,
)
from benchmarks.options import AGAIN
from benchmarks.spread import Spread
from vllm_mtp.config import METHOD
from vllm_mtp.tools.engine_process import NO_SPECULATION
from vllm_mtp.tools.options import option


@dataclass(frozen=True, kw_only=True)
class OffBench(Bench):
    """Compare mtp_plus with K pinned to 0 with an engine without speculation."""

    command: ClassVar[str] = "off"

    concurrency: tuple[int, ...] = option((1, 16), "Requests at a time.", 1, 256)
    request_tokens: int = option(128, "Tokens of every request.", 2, 512)
    temperature: float = option(0.0, "Of sampling; 0 is greedy.", 0, 2)
    repeats: int = option(7, "Timed rounds of each engine.", 1, 100)

    @property
    def contenders(self) -> Contenders:
        """No speculation twice, and ours."""
        return {NO_SPECULATION: None, AGAIN: None, METHOD: {"method": METHOD}}

    @property
    def cells(self) -> Sequence[int]:
        """Requests at a time."""
        return self.concurrency

    @property
    def longest_tokens(self) -> int:
        """Of an answer."""
        return self.request_tokens

    def waves(self, prompts: Prompts, concurrency: int) -> Iterator[Waves]:
        """Requests whose K is pinned; engines without speculation do not care."""
        sampling = {
            "temperature": self.temperature,
            "max_tokens": self.request_tokens,
            "extra_args": {METHOD: {"k": 0}},
        }
        return same_wave(prompts, concurrency, sampling)

    def summarise(self, cells: Mapping[int, Rounds]) -> dict[str, Any]:
        """See the top of this file."""
        return {
            "cells": {
                str(concurrency): self._summarise_cell(rounds)
                for concurrency, rounds in cells.items()
            },
            "identical_texts": None if self.temperature else texts_agree(cells),
        }

    def _summarise_cell(self, rounds: Rounds) -> dict[str, Any]:
        none, again, plus = (
            spread_of(rounds, name, full_speed) for name in self.contenders
        )
        mean = Spread.of_geometric_mean(none, again)
        return {
            "over_none": Spread.of_ratio(plus, mean).as_json(),
            "none_again": Spread.of_ratio(again, none).as_json(),
            "step_ms": {
                name: spread_of(rounds, name, full_step_ms).median
                for name in self.contenders
            },
        }

    @staticmethod
    def show(result: Mapping[str, Any], console: Console) -> None:
        """A line for each concurrency."""
        table = Table(title="K pinned to 0, of an engine without speculation")
        for column in ("requests", "mtp_plus", "quartiles", "none again", "ms a step"):
            table.add_column(column, justify="right")
        for concurrency, cell in result["cells"].items():
            table.add_row(
                concurrency,
                *ratio_row(cell["over_none"]),
                f"{cell['none_again']['median']:.3f}",
                f"{cell['step_ms'][NO_SPECULATION]:.1f}",
            )
        console.print(table)
        say_texts(result, console)
