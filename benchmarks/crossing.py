"""A load that keeps crossing the threshold of vLLM's batch-size table (vllm#49548).

Eight requests begin together and end one after another, again and again, so the batch
falls from eight to one and jumps back. With a table (``num_speculative_tokens_per_``
``batch_size``: K up to a batch size, 0 above) vLLM switches drafting on and off within
every wave; users saw throughput collapse.

Result (JSON)::

    contenders.<name>.speculative_config   what the engine was given
                     .tokens_per_s         spread over the repeats: decode steps only
                     .over_none            paired ratios
                     .mean_draft_length, .acceptance_length
    identical_texts, options, provenance
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from benchmarks.grid.cells import CODE, Prompts
from benchmarks.harness import (
    Bench,
    Contenders,
    Figures,
    Rounds,
    Waves,
    acceptance_length,
    ratio_row,
    say_texts,
    spread_of,
    texts_agree,
)
from benchmarks.spread import Spread
from vllm_mtp.config import DEFAULT_FIXED_DRAFT_LENGTH, METHOD, VLLM_METHOD
from vllm_mtp.tools.engine_process import NO_SPECULATION
from vllm_mtp.tools.options import option

CONCURRENCY = 8
TABLE = f"{VLLM_METHOD} with a table"


@dataclass(frozen=True, kw_only=True)
class CrossingBench(Bench):
    """Let the batch cross the threshold of vLLM's batch-size table (vllm#49548)."""

    command: ClassVar[str] = "crossing"

    draft_length: int = option(
        DEFAULT_FIXED_DRAFT_LENGTH, "K of vLLM's own mtp, with and without table.", 1, 8
    )
    threshold: int = option(
        4, "Largest batch for which vLLM's table drafts.", 1, CONCURRENCY - 1
    )
    request_tokens: int = option(
        12, "Of the shortest request; the others have 2, 3, .. 8 times that.", 1, 100
    )
    num_waves: int = option(2, "Times that a round fills up.", 1, 100, name="waves")

    @property
    def contenders(self) -> Contenders:
        """Speculative config of each."""
        fixed = {"method": VLLM_METHOD, "num_speculative_tokens": self.draft_length}
        table = [
            (1, self.threshold, self.draft_length),
            (self.threshold + 1, CONCURRENCY, 0),
        ]
        return {
            NO_SPECULATION: None,
            f"{VLLM_METHOD} K={self.draft_length}": fixed,
            TABLE: {**fixed, "num_speculative_tokens_per_batch_size": table},
            METHOD: {"method": METHOD},
        }

    @property
    def cells(self) -> Sequence[int]:
        """One."""
        return (CONCURRENCY,)

    @property
    def longest_tokens(self) -> int:
        """Of an answer."""
        return CONCURRENCY * self.request_tokens

    def waves(self, prompts: Prompts, concurrency: int) -> Iterator[Waves]:
        """Waves of eight requests, each one longer than the one before."""
        own = prompts.own[CODE]
        waves = [
            [
                {
                    "prompt": list(own[(concurrency * wave + i) % len(own)]),
                    "sampling": {
                        "temperature": 0.0,
                        "max_tokens": self.request_tokens * (i + 1),
                    },
                }
                for i in range(concurrency)
            ]
            for wave in range(self.num_waves)
        ]
        return repeat(waves)

    def summarise(self, cells: Mapping[int, Rounds]) -> dict[str, Any]:
        """See the top of this file."""
        (rounds,) = cells.values()
        speeds = {name: spread_of(rounds, name, _speed) for name in self.contenders}
        none = speeds[NO_SPECULATION]
        return {
            "contenders": {
                name: {
                    "speculative_config": config,
                    "tokens_per_s": speeds[name].as_json(),
                    "over_none": Spread.of_ratio(speeds[name], none).as_json(),
                    **_lengths([each[name] for each in rounds]),
                }
                for name, config in self.contenders.items()
            },
            "identical_texts": texts_agree(cells),
        }

    @staticmethod
    def show(result: Mapping[str, Any], console: Console) -> None:
        """A line for each contender."""
        table = Table(title="A batch that keeps crossing the table's threshold")
        columns = ("contender", "tokens/s", "of none", "quartiles", "K", "acc. length")
        for column in columns:
            justify = "left" if column == "contender" else "right"
            table.add_column(column, justify=justify)  # type: ignore[arg-type]
        for name, figures in result["contenders"].items():
            table.add_row(
                name,
                f"{figures['tokens_per_s']['median']:.0f}",
                *ratio_row(figures["over_none"]),
                f"{figures['mean_draft_length']:.2f}",
                f"{figures['acceptance_length']:.2f}",
            )
        console.print(table)
        say_texts(result, console)


def _speed(figures: Figures) -> float:
    return float(figures["decode_tokens"] / figures["decode_seconds"])


def _lengths(own: Sequence[Figures]) -> dict[str, float]:
    drafted = sum(sum(each["drafted_per_position"]) for each in own)
    return {
        "mean_draft_length": drafted / sum(each["request_steps"] for each in own),
        "acceptance_length": acceptance_length(own),
    }
