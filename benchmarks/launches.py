"""What a step launches: kernels, graphs and copies, by torch's profiler.

Three engines serve the same greedy requests: without speculation, vLLM's `mtp`, and
`mtp_plus` with K pinned by the request. Prompts are counted, too; of long answers they
are little. On a CPU there are torch's operations alone.

Result (JSON)::

    cells.<concurrency>.<contender>.<kind>   per decode step, median over the repeats
                                   .step_ms  of such a step, profiled
    kinds                   their names
    options, provenance
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from benchmarks.grid.cells import Prompts
from benchmarks.grid.engines import Timed
from benchmarks.harness import Bench, Contenders, Rounds, Waves, same_wave
from benchmarks.step_split import LAUNCHES
from vllm_mtp.config import METHOD, VLLM_METHOD
from vllm_mtp.tools.engine_process import NO_SPECULATION
from vllm_mtp.tools.options import option


@dataclass(frozen=True, kw_only=True)
class LaunchesBench(Bench):
    """Count what a step of each engine launches."""

    command: ClassVar[str] = "launches"
    timed: ClassVar[Timed | None] = "launches"

    draft_length: int = option(0, "K that requests pin.", 0, 16)
    mtp_draft_length: int = option(0, "K of mtp; 0: as pinned, or 1.", 0, 16)
    concurrency: tuple[int, ...] = option((1,), "Requests at a time.", 1, 256)
    request_tokens: int = option(128, "Tokens of every request.", 2, 512)
    repeats: int = option(2, "Timed rounds of each engine.", 1, 100)

    @property
    def file_name(self) -> str:
        """First part of the result's name."""
        return f"{self.command}-k{self.draft_length}"

    @property
    def contenders(self) -> Contenders:
        """Speculative config by name."""
        static = self.mtp_draft_length or self.draft_length or 1
        usual = {"num_speculative_tokens": static}
        return {
            NO_SPECULATION: None,
            VLLM_METHOD: {"method": VLLM_METHOD} | usual,
            METHOD: {"method": METHOD},
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
        """Requests whose K is pinned; other engines do not care."""
        sampling = {
            "temperature": 0.0,
            "max_tokens": self.request_tokens,
            "extra_args": {METHOD: {"k": self.draft_length}},
        }
        return same_wave(prompts, concurrency, sampling)

    def summarise(self, cells: Mapping[int, Rounds]) -> dict[str, Any]:
        """See the top of this file."""
        found = {
            str(concurrency): {
                name: _summarise([each[name] for each in rounds])
                for name in self.contenders
            }
            for concurrency, rounds in cells.items()
        }
        return {"cells": found, "kinds": LAUNCHES}

    @staticmethod
    def show(result: Mapping[str, Any], console: Console) -> None:
        """A line for each contender and concurrency."""
        table = Table(title="Launched in a decode step")
        for column in ("requests", "engine", *LAUNCHES, "ms"):
            table.add_column(column, justify="left" if column == "engine" else "right")
        for concurrency, cell in result["cells"].items():
            for name, each in cell.items():
                counts = (f"{each[kind]:.1f}" for kind in LAUNCHES)
                table.add_row(concurrency, name, *counts, f"{each['step_ms']:.2f}")
        console.print(table)


def _summarise(own: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    steps = [each["decode_steps"] for each in own]
    counts = [each["decode_split_seconds"] for each in own]
    found = {
        kind: median(c[kind] / n for c, n in zip(counts, steps, strict=True))
        for kind in LAUNCHES
    }
    seconds = [each["decode_seconds"] / n for each, n in zip(own, steps, strict=True)]
    return found | {"step_ms": 1e3 * median(seconds)}
