"""A plan as tables and as JSON."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_mtp.tools.plan import Plan, PlanOptions, Row, make_plan
from vllm_mtp.tools.plan_fleet import (
    ASSUMPTIONS,
    Fleet,
    FleetOptions,
    Layout,
    plan_fleet,
)
from vllm_mtp.tools.provenance import collect_provenance, write_json

_OF_ALL = (
    "; all requests accept alike and use the same K; positions after the last given "
    "one accept like it."
)
PROBED = (
    "Assumed: a step takes as long as in the doctor's probe, at its batch, and between "
    "two probed K a straight line" + _OF_ALL
)
ROOFLINE = (
    "Assumed: a pass takes the longer of reading weights and multiplying, plus reading "
    "the KV cache, plus launches, at 70 % of the bandwidth and 60 % of the FLOP/s of "
    "the data sheet, all divided evenly among the GPUs; the target's rows are padded "
    "to the next CUDA graph (1, 2, 4, multiples of 8); experts are chosen evenly, and "
    "rows sent to them over a link that is equally fast between all GPUs" + _OF_ALL
)


def assumptions(options: PlanOptions) -> str:
    """Of the source of step times."""
    return PROBED if options.probe else ROOFLINE


def run_plan(
    options: PlanOptions, output: Path | None, console: Console
) -> dict[str, Any]:
    """Compute, print and, if a file is named, write JSON."""
    plan = make_plan(options)
    result = as_json(plan, options)
    print_plan(plan, options, console)
    if output is not None:
        write_json(output, result)
        console.print(f"Written: {output}", markup=False)
    return result


def as_json(plan: Plan, options: PlanOptions) -> dict[str, Any]:
    """For a file."""
    return {
        "rows": [row._asdict() for row in plan.rows],
        "best": {str(batch): row._asdict() for batch, row in plan.best.items()},
        "stops_paying_at": plan.stops_paying_at,
        "assumptions": assumptions(options),
        "options": asdict(options),
        "provenance": collect_provenance(sys.argv),
    }


def print_plan(plan: Plan, options: PlanOptions, console: Console) -> None:
    """A table for each batch and sentences."""
    for batch, best in plan.best.items():
        rows = [row for row in plan.rows if row.batch == batch]
        console.print(_table(rows, best, options))
    for batch, best in plan.best.items():
        where = "" if options.is_measured else f"batch {batch}: "
        console.print(where + _verdict(best), highlight=False)
    if not options.is_measured:
        console.print(_until(plan.stops_paying_at), highlight=False)
    console.print(assumptions(options), highlight=False)


def _table(rows: Sequence[Row], best: Row, options: PlanOptions) -> Table:
    title = (
        "Measured times"
        if options.is_measured
        else f"{options.num_gpus} x {options.hardware.name}, {options.model.name}, "
        f"batch {rows[0].batch}, context {options.context_tokens}"
    )
    table = Table(title=title)
    for column in ("K", "acceptance length", "speedup, drafts free", "speedup"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row.draft_length),
            f"{row.acceptance_length:.2f}",
            f"{row.speedup_if_drafts_were_free:.2f}",
            f"{row.speedup:.2f}",
            style="bold" if row is best or row == best else None,
        )
    return table


def _verdict(best: Row) -> str:
    if not best.draft_length:
        return "no draft length pays"
    return f"best K {best.draft_length}, {best.speedup:.2f}x"


def _until(stops_paying_at: int | None) -> str:
    if stops_paying_at is None:
        return "Speculation pays at every batch up to 1024."
    if stops_paying_at == 1:
        return "Speculation does not pay at any batch."
    return f"Speculation stops paying at batch {stops_paying_at}."


def run_plan_fleet(
    options: FleetOptions, output: Path | None, console: Console
) -> dict[str, Any]:
    """Compute, print and, if a file is named, write JSON.

    Raises:
        ConfigError: No layout serves the demand.
    """
    fleet = plan_fleet(options)
    plain = fleet.without_speculation
    result = {
        "layouts": [layout._asdict() for layout in fleet.layouts],
        "best": fleet.best._asdict(),
        "without_speculation": plain and plain._asdict(),
        "assumptions": f"{ROOFLINE} {ASSUMPTIONS}",
        "options": asdict(options),
        "provenance": collect_provenance(sys.argv),
    }
    print_fleet(fleet, options, console)
    if output is not None:
        write_json(output, result)
        console.print(f"Written: {output}", markup=False)
    return result


def print_fleet(fleet: Fleet, options: FleetOptions, console: Console) -> None:
    """A table of layouts and sentences."""
    plan = options.plan
    table = Table(
        title=f"{options.tokens_per_s:,.0f} tokens/s of {plan.model.name} on "
        f"{plan.hardware.name}, prompts of {options.prompt_tokens} and answers of "
        f"{options.answer_tokens} tokens"
    )
    sharing = "TP" if plan.model.experts is None else "TP and EP"
    for column in (
        sharing, "batch", "K", "ms per token", "tokens/s a replica", "replicas", "GPUs",
        "GPU h per M tokens",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for layout in fleet.layouts:
        table.add_row(
            str(layout.gpus_per_replica),
            str(layout.batch),
            str(layout.draft_length),
            f"{layout.tpot_ms:.1f}",
            f"{layout.replica_tokens_per_s:,.0f}",
            str(layout.replicas),
            str(layout.num_gpus),
            f"{layout.gpu_hours_per_million:.3f}",
            style="bold" if layout == fleet.best else None,
        )
    console.print(table)
    console.print(f"Cheapest: {_described(fleet.best)}", highlight=False)
    plain = fleet.without_speculation
    console.print(
        "Without speculation no layout keeps max-tpot-ms."
        if plain is None
        else f"Without speculation: {_described(plain)}",
        highlight=False,
    )
    console.print(ROOFLINE, highlight=False)
    console.print(ASSUMPTIONS, highlight=False)


def _described(layout: Layout) -> str:
    cost = layout.cost_per_million
    price = "" if cost is None else f", {cost:.3f} per million tokens"
    return (
        f"{layout.replicas} replicas of {layout.gpus_per_replica} GPUs, batch "
        f"{layout.batch}, K {layout.draft_length}: {layout.num_gpus} GPUs, "
        f"{layout.tpot_ms:.1f} ms per token{price}"
    )
