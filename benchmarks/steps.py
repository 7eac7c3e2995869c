"""Step times side by side: one engine per contender, taking turns.

Greedy contenders with the same draft length take the same steps, so a ratio of step
times is what a change costs, and nothing else.

Result (JSON)::

    contenders.<name>.speculative_config   what the engine was given
                     .step_ms              median, quartiles, and each repeat
                     .ratio                step time over the first contender's, paired
                                           within a repeat: median, quartiles, each
                     .num_steps            engine steps of each repeat
                     .acceptance_length    tokens per draft, of all repeats
    baseline                               name of the first contender
    identical_texts                        whether all wrote the same tokens
    options, provenance
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.grid.cells import Prompts
from benchmarks.harness import (
    Bench,
    Contenders,
    Rounds,
    Waves,
    full_step_ms,
    ratio_row,
    same_wave,
    say_texts,
    spread_of,
    texts_agree,
)
from benchmarks.spread import Spread
from vllm_mtp.config import METHOD, VLLM_METHOD, ConfigError
from vllm_mtp.tools.engine_process import NO_SPECULATION
from vllm_mtp.tools.options import option
from vllm_mtp.tools.provenance import describe_hardware, replacing


@dataclass(frozen=True, kw_only=True)
class StepBench(Bench):
    """Compare the step time of engines, side by side."""

    command: ClassVar[str] = "steps"

    contender: list[str] | None = option(
        None,
        "NAME=none or NAME={...}, a speculative config; at least two, the first is "
        "compared with. Unset: vLLM's mtp, mtp_plus, mtp_plus with scrub.",
    )
    draft_length: int = option(5, "K of the unset contenders.", 1, 16)
    concurrency: int = option(1, "Requests at a time.", 1, 64)
    request_tokens: int = option(64, "Tokens of every request.", 2, 512)
    requests: int = option(12, "Requests of a round.", 1, 1000)
    repeats: int = option(9, "Timed rounds of each engine.", 1, 100)

    def __post_init__(self) -> None:
        """Check every option; see `Options`."""
        super().__post_init__()
        names = [name for name, _ in map(parse_contender, self.contender or ())]
        if self.contender and (len(names) < 2 or len(set(names)) != len(names)):
            raise ConfigError(
                f"contender: {', '.join(names)}; expected at least two, each name once"
            )

    @property
    def contenders(self) -> Contenders:
        """vLLM's own `mtp` and both rollbacks of `mtp_plus`, drafting equally long."""
        if self.contender:
            return dict(map(parse_contender, self.contender))
        same = {"num_speculative_tokens": self.draft_length}
        ours = {"method": METHOD, **same, "controller": "fixed"}
        return {
            f"mtp K={self.draft_length}": {"method": VLLM_METHOD, **same},
            "mtp_plus": ours,
            "mtp_plus scrub": {**ours, "kv_rollback": "scrub"},
        }

    @property
    def cells(self) -> Sequence[int]:
        """One."""
        return (self.concurrency,)

    @property
    def longest_tokens(self) -> int:
        """Of an answer."""
        return self.request_tokens

    def waves(self, prompts: Prompts, concurrency: int) -> Iterator[Waves]:
        """The same greedy requests in every round."""
        sampling = {"temperature": 0.0, "max_tokens": self.request_tokens}
        return same_wave(prompts, max(self.requests, concurrency), sampling)

    def summarise(self, cells: Mapping[int, Rounds]) -> dict[str, Any]:
        """See the top of this file."""
        (rounds,) = cells.values()
        baseline, *_ = self.contenders
        step_ms = {
            name: spread_of(rounds, name, full_step_ms) for name in self.contenders
        }
        contenders = {}
        for name, config in self.contenders.items():
            own = [each[name] for each in rounds]
            num_drafts = sum(each["num_drafts"] for each in own)
            num_accepted = sum(sum(each["accepted_per_position"]) for each in own)
            contenders[name] = {
                "speculative_config": config,
                "step_ms": step_ms[name].as_json(),
                "ratio": Spread.of_ratio(step_ms[name], step_ms[baseline]).as_json(),
                "num_steps": [each["num_steps"] for each in own],
                "acceptance_length": num_drafts and 1 + num_accepted / num_drafts,
            }
        return {
            "baseline": baseline,
            "contenders": contenders,
            "identical_texts": texts_agree(cells),
        }

    @staticmethod
    def show(result: Mapping[str, Any], console: Console) -> None:
        """A line for each contender."""
        table = Table(title="Engine step time")
        table.add_column("contender")
        titles = ("step ms", f"of {result['baseline']}", "quartiles", "tokens/draft")
        for title in titles:
            table.add_column(title, justify="right")
        for name, each in result["contenders"].items():
            length = each["acceptance_length"]
            table.add_row(
                name,
                f"{each['step_ms']['median']:.3f}",
                *ratio_row(each["ratio"]),
                f"{length:.2f}" if length else "-",
            )
        console.print(table)
        say_texts(result, console)

    @staticmethod
    def draw(result: Mapping[str, Any], path: Path) -> None:
        """The ratios of all repeats, a box for each contender."""
        with replacing(path) as pending:
            draw_steps(result).savefig(pending, dpi=140, format="png")


def parse_contender(text: str) -> tuple[str, dict[str, Any] | None]:
    """`NAME=JSON`, where JSON is a speculative config or `none`.

    Raises:
        ConfigError: It is neither.
    """
    name, separator, config = text.partition("=")
    if name and config.strip() == NO_SPECULATION:
        return name, None
    try:
        parsed = json.loads(config)
    except (ValueError, RecursionError):
        parsed = None
    if not (name and separator and isinstance(parsed, dict)):
        raise ConfigError(
            f"contender: {text!r}; expected NAME=none or NAME={{...}}, a speculative "
            "config"
        )
    return name, parsed


def draw_steps(result: Mapping[str, Any]) -> Figure:
    """The ratios of all repeats, a box for each contender."""
    contenders = result["contenders"]
    hardware = result["provenance"]["hardware"]
    figure = Figure(figsize=(7, 1.2 + 0.6 * len(contenders)), layout="constrained")
    axes = figure.subplots()
    axes.boxplot(
        [each["ratio"]["each"] for each in contenders.values()],
        tick_labels=list(contenders),
        orientation="horizontal",
    )
    axes.invert_yaxis()
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set_xlabel(f"engine step time, as a ratio to {result['baseline']}")
    options = result["options"]
    axes.set_title(
        f"{describe_hardware(hardware)}; {options['dtype']}, "
        f"{options['concurrency']} at a time",
        fontsize=9,
    )
    return figure
