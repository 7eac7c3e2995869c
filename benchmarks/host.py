"""What a step costs the host: CPU time of the thread that feeds the device.

vLLM's engine schedules, learns and launches in one thread. A GPU that is done with a
step in 3 ms waits for it, so there what this thread does counts like arithmetic. Three
engines serve the same requests in turns: one without speculation, vLLM's `mtp` and
`mtp_plus`, both bounded by the same K.

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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.grid.cells import Prompts
from benchmarks.grid.engines import Timed
from benchmarks.harness import (
    Bench,
    Contenders,
    Figures,
    Rounds,
    Waves,
    acceptance_length,
    same_wave,
    spread_of,
)
from benchmarks.spread import Spread
from vllm_mtp.config import METHOD, VLLM_METHOD
from vllm_mtp.tools.engine_process import NO_SPECULATION
from vllm_mtp.tools.options import option

PARTS = ("schedule", "update", "worker")
"""See ``engine.py``."""


@dataclass(frozen=True, kw_only=True)
class HostBench(Bench):
    """Measure the CPU time by which scheduling may keep a fast GPU waiting."""

    command: ClassVar[str] = "host"
    timed: ClassVar[Timed | None] = "host"

    draft_length: int = option(
        5, "K of vLLM's own mtp, and the bound of mtp_plus.", 1, 16
    )
    concurrency: tuple[int, ...] = option((1, 32), "Requests at a time.", 1, 256)
    request_tokens: int = option(256, "Tokens of every request.", 2, 512)

    @property
    def contenders(self) -> Contenders:
        """Speculative config by name."""
        bound = {"num_speculative_tokens": self.draft_length}
        return {
            NO_SPECULATION: None,
            VLLM_METHOD: {"method": VLLM_METHOD} | bound,
            METHOD: {"method": METHOD} | bound,
        }

    @property
    def cells(self) -> Sequence[int]:
        """Requests at a time."""
        return self.concurrency

    @property
    def longest_tokens(self) -> int:
        """Of an answer."""
        return self.request_tokens

    def waves(self, prompts: Prompts, concurrency: int) -> Iterator[Waves]:
        """The same greedy requests in every round."""
        sampling = {"temperature": 0.0, "max_tokens": self.request_tokens}
        return same_wave(prompts, concurrency, sampling)

    def summarise(self, cells: Mapping[int, Rounds]) -> dict[str, Any]:
        """See the top of this file."""
        return {
            "cells": {
                str(concurrency): {
                    name: _summarise(name, rounds) for name in self.contenders
                }
                for concurrency, rounds in cells.items()
            },
            "parts": PARTS,
        }

    @staticmethod
    def show(result: Mapping[str, Any], console: Console) -> None:
        """A line for each contender and concurrency."""
        table = Table(
            title="CPU time of the engine's thread, microseconds a decode step",
            box=box.SIMPLE_HEAVY,
            pad_edge=False,
        )
        columns = ("requests", "engine", *PARTS, "beyond mtp", "step ms", "tokens")
        for column in columns:
            justify: Literal["left", "right"] = (
                "left" if column == "engine" else "right"
            )
            table.add_column(column, justify=justify, no_wrap=True)
        for concurrency, cell in result["cells"].items():
            for name, each in cell.items():
                table.add_row(
                    concurrency,
                    name,
                    *(f"{each[f'{part}_us']['median']:.0f}" for part in PARTS),
                    f"{each['over_mtp_us']['median']:+.0f}",
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


def _summarise(name: str, rounds: Rounds) -> dict[str, Any]:
    own = [each[name] for each in rounds]
    usual = [_scheduling_us(each[VLLM_METHOD]) for each in rounds]
    beyond = [_scheduling_us(a) - b for a, b in zip(own, usual, strict=True)]
    parts = {
        f"{part}_us": Spread.of([_part_us(each, part) for each in own]).as_json()
        for part in PARTS
    }
    return parts | {
        "over_mtp_us": Spread.of(beyond).as_json(),
        "step_ms": spread_of(rounds, name, _step_ms).median,
        "acceptance_length": acceptance_length(own),
    }


def _step_ms(figures: Figures) -> float:
    return float(1e3 * figures["decode_seconds"] / figures["decode_steps"])


def _part_us(figures: Figures, part: str) -> float:
    seconds: float = figures["decode_split_seconds"][part]
    return 1e6 * seconds / float(figures["decode_steps"])


def _scheduling_us(figures: Figures) -> float:
    return _part_us(figures, "schedule") + _part_us(figures, "update")
