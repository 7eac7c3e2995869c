"""What scheduling costs a step, with a device that answers at once (`modelless`).

vLLM's engine schedules, learns and launches in one thread. A GPU that is done with a
step in 3 ms waits for it, so there what this thread does counts like arithmetic. Four
schedulers with async scheduling serve the same kind of requests in turns: without
speculation, vLLM's `mtp`, `mtp_plus` where drafts are accepted, and where none is, so
that it disables drafting.

Result (JSON)::

    cells.<concurrency>.<contender>.schedule_us   CPU time of a decode step: spread
                                   .update_us     over the repeats
                                   .beyond_us     both, beyond those of `mtp`; where
                                                  drafting is disabled, of none
                                   .acceptance_length
    parts                   their names
    options, provenance
"""

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.harness import Measurement
from benchmarks.spread import Spread
from vllm_mtp.config import METHOD, VLLM_METHOD
from vllm_mtp.tools.engine_process import NO_SPECULATION
from vllm_mtp.tools.option_checks import resolve_model
from vllm_mtp.tools.options import option

PARTS = ("schedule", "update")
OFF = f"{METHOD}, off"
_BESIDE = {METHOD: VLLM_METHOD, OFF: NO_SPECULATION}


@dataclass(frozen=True, kw_only=True)
class HostBench(Measurement):
    """Measure the CPU time by which scheduling may keep a fast GPU waiting."""

    command: ClassVar[str] = "host"

    draft_length: int = option(3, "K of vLLM's own mtp.", 1, 16)
    acceptance: float = option(0.85, "Chance of a draft token to be accepted.", 0, 1)
    concurrency: tuple[int, ...] = option((1, 32, 256), "Requests at a time.", 1, 1024)
    request_tokens: int = option(256, "Most tokens of a request.", 16, 4096)
    steps: int = option(200, "Timed steps of a turn, without prompts.", 10, 100_000)
    repeats: int = option(7, "Turns of each.", 1, 100)

    @property
    def contenders(self) -> dict[str, tuple[dict[str, Any] | None, float]]:
        """Speculative config and acceptance by name."""
        usual = {"method": VLLM_METHOD, "num_speculative_tokens": self.draft_length}
        return {
            NO_SPECULATION: (None, 0.0),
            VLLM_METHOD: (usual, self.acceptance),
            METHOD: ({"method": METHOD}, self.acceptance),
            OFF: ({"method": METHOD}, 0.0),
        }

    def measure(self, console: Console) -> dict[str, Any]:
        """Play all cells; see the top of this file."""
        cells = {str(n): self._play(n, console) for n in self.concurrency}
        return {"cells": cells, "parts": PARTS}

    def _play(self, num_requests: int, console: Console) -> dict[str, Any]:
        # Imports vLLM, which other commands do not need.
        from benchmarks.modelless import Modelless

        console.print(f"{num_requests} requests at a time", highlight=False)
        model = resolve_model(self.model)
        running = {
            name: Modelless(model, config, num_requests, self.request_tokens, accepted)
            for name, (config, accepted) in self.contenders.items()
        }
        for each in running.values():
            each.run(self.steps)
        gc.collect()
        gc.freeze()  # as vLLM does before it serves
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in running}
        for _ in range(self.repeats):
            for name, each in running.items():
                turns[name].append(each.timed(self.steps))
        return summarise(turns)

    @staticmethod
    def show(result: Mapping[str, Any], console: Console) -> None:
        """A line for each contender and concurrency."""
        table = Table(
            title="CPU time of the scheduler, microseconds a decode step",
            box=box.SIMPLE_HEAVY,
            pad_edge=False,
        )
        for column in ("requests", "scheduler", *PARTS, "beyond", "tokens"):
            is_name = column == "scheduler"
            justify: Literal["left", "right"] = "left" if is_name else "right"
            table.add_column(column, justify=justify, no_wrap=True)
        for concurrency, cell in result["cells"].items():
            for name, each in cell.items():
                beyond = each["beyond_us"]
                table.add_row(
                    concurrency,
                    name,
                    *(f"{each[f'{part}_us']['median']:.0f}" for part in PARTS),
                    f"{beyond['median']:+.0f}" if beyond else "",
                    f"{each['acceptance_length']:.2f}",
                )
        console.print(table)
        console.print(
            "beyond: of mtp_plus beside mtp; off beside no speculation.",
            highlight=False,
        )


def summarise(turns: Mapping[str, list[dict[str, float]]]) -> dict[str, Any]:
    """A cell, from what each scheduler took turn by turn."""
    return {name: _summarise(name, turns) for name in turns}


def _summarise(name: str, turns: Mapping[str, list[dict[str, float]]]) -> Any:
    own, beyond = turns[name], None
    if name in _BESIDE:
        pairs = zip(own, turns[_BESIDE[name]], strict=True)
        differences = [_total_us(a) - _total_us(b) for a, b in pairs]
        beyond = Spread.of(differences).as_json()
    parts = {
        f"{part}_us": Spread.of([turn[part] for turn in own]).as_json()
        for part in PARTS
    }
    lengths = [turn["acceptance_length"] for turn in own]
    return parts | {
        "beyond_us": beyond,
        "acceptance_length": Spread.of(lengths).median,
    }


def _total_us(turn: Mapping[str, float]) -> float:
    return sum(turn[part] for part in PARTS)
