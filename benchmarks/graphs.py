"""CUDA graphs: how many an engine captures, how long that takes, and the memory.

Engines without speculation, with vLLM's `mtp` and with `mtp_plus` start one after the
other. Without a GPU there are none.

Result (JSON)::

    graphs.<contender>.graph_seconds     of their capture
                      .graph_bytes       of the GPU, by what is free before and after
                      .num_graphs        of a layer or of a batch
                      .num_full_graphs   of a whole batch
    options, provenance
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from benchmarks.grid.cells import Prompts
from benchmarks.harness import Contenders, EngineBench
from vllm_mtp.config import METHOD, VLLM_METHOD
from vllm_mtp.tools.engine_process import NO_SPECULATION, EngineGroup
from vllm_mtp.tools.options import option

FIGURES = ("graph_seconds", "graph_bytes", "num_graphs", "num_full_graphs")


@dataclass(frozen=True, kw_only=True)
class GraphsBench(EngineBench):
    """Compare what capturing CUDA graphs takes at an engine's start."""

    command: ClassVar[str] = "graphs"
    starts_in_turn: ClassVar[bool] = True

    draft_length: int = option(3, "K of vLLM's own mtp.", 1, 16)
    concurrency: int = option(256, "Most requests at a time.", 1, 1024)
    request_tokens: int = option(128, "Of the longest answer.", 2, 512)

    @property
    def contenders(self) -> Contenders:
        """Speculative config by name."""
        static = {"method": VLLM_METHOD, "num_speculative_tokens": self.draft_length}
        return {NO_SPECULATION: None, VLLM_METHOD: static, METHOD: {"method": METHOD}}

    @property
    def most_requests(self) -> int:
        """At a time."""
        return self.concurrency

    @property
    def longest_tokens(self) -> int:
        """Of an answer."""
        return self.request_tokens

    def play(
        self, group: EngineGroup, prompts: Prompts, console: Console
    ) -> dict[str, Any]:
        """What the engines took note of when they started."""
        facts = {name: group.engines[name].ask("facts") for name in self.contenders}
        return {
            "graphs": {
                name: {figure: each[figure] for figure in FIGURES}
                for name, each in facts.items()
            }
        }

    @staticmethod
    def show(result: Mapping[str, Any], console: Console) -> None:
        """A line for each engine."""
        table = Table(title="CUDA graphs")
        for column in ("engine", "full", "all", "s", "GiB"):
            table.add_column(column, justify="left" if column == "engine" else "right")
        for name, each in result["graphs"].items():
            table.add_row(
                name,
                str(each["num_full_graphs"]),
                str(each["num_graphs"]),
                f"{each['graph_seconds']:.1f}",
                f"{each['graph_bytes'] / 2**30:.2f}",
            )
        console.print(table)
