"""A plan as tables and as JSON."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_mtp.tools.plan import Plan, PlanOptions, Row, make_plan
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
