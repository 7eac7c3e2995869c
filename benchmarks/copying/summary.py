"""Figures of the copying benchmark, and how they are shown."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness import (
    Rounds,
    acceptance_length,
    full_speed,
    say_texts,
    spread_of,
)
from benchmarks.spread import Spread, resampled_interval


def summarise_cell(rounds: Rounds, names: Sequence[str]) -> dict[str, Any]:
    """Figures of each engine, and ratios of each to all named before it."""
    speeds = {name: spread_of(rounds, name, full_speed) for name in names}
    ratios: dict[str, dict[str, Any]] = {name: {} for name in names[1:]}
    for under, over in combinations(names, 2):
        ratios[over][under] = _ratio(speeds[over], speeds[under])
    engines = {}
    for name in names:
        own = [each[name] for each in rounds]
        drafted = sum(sum(each["drafted_per_position"]) for each in own)
        engines[name] = {
            "tokens_per_s": speeds[name].as_json(),
            "acceptance_length": acceptance_length(own),
            "mean_draft_length": drafted / sum(each["request_steps"] for each in own),
        }
    return {"engines": engines, "ratios": ratios}


def _ratio(over: Spread, under: Spread) -> dict[str, Any]:
    each = Spread.of_ratio(over, under).each
    return {
        "geometric_mean": statistics.geometric_mean(each),
        "interval": list(resampled_interval(each)),
        "each": list(each),
    }


def print_report(result: Mapping[str, Any], console: Console) -> None:
    """A table for each cell, and what the answers are like."""
    for cell in result["cells"]:
        _print_cell(cell, console)
    for load, found in result["loads"].items():
        prompt, context = (
            "/".join(f"{share:.2f}" for share in found["copied"][source].values())
            for source in ("from_prompt", "from_context")
        )
        console.print(
            f"{load}: of the answers {prompt} continue a match in the prompt and "
            f"{context} one anywhere before (of 4 / 8 tokens or more); equal from all "
            f"engines: {found['num_equal']} of {found['num_requests']}",
            highlight=False,
        )
    say_texts(result, console)


def _print_cell(cell: Mapping[str, Any], console: Console) -> None:
    table = Table(title=f"{cell['load']}, {cell['concurrency']} requests at a time")
    table.add_column("engine")
    first, *_ = cell["engines"]
    for column in ("acc. length", "drafted", "tokens/s", f"of {first}"):
        table.add_column(column, justify="right")
    for name, figures in cell["engines"].items():
        table.add_row(
            name,
            f"{figures['acceptance_length']:.2f}",
            f"{figures['mean_draft_length']:.2f}",
            f"{figures['tokens_per_s']['median']:.0f}",
            _shown(cell["ratios"][name][first]) if name != first else "",
        )
    console.print(table)
    for over, by_engine in cell["ratios"].items():
        for under, ratio in by_engine.items():
            if under != first:
                console.print(f"{over} of {under}: {_shown(ratio)}", highlight=False)


def _shown(ratio: Mapping[str, Any]) -> str:
    low, high = ratio["interval"]
    return f"{ratio['geometric_mean']:.3f} ({low:.3f}..{high:.3f})"
