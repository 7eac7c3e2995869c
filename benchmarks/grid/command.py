"""``python -m benchmarks grid``: measures, or shows what was measured."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.grid.bench import report_only, run_grid_bench
from benchmarks.grid.options import GridOptions
from vllm_mtp.tools.options import option

INTERRUPTED = (
    "interrupted; the engines are stopped and what was measured is kept: the same "
    "command continues"
)


@dataclass(frozen=True, kw_only=True)
class GridCommand(GridOptions):
    __doc__ = GridOptions.__doc__

    report_only: Path | None = option(
        None, "Measure nothing: make tables and pictures from this .jsonl."
    )


def run_grid_command(chosen: GridCommand, console: Console) -> dict[str, Any]:
    """Measure, unless a journal is named."""
    if chosen.report_only is not None:
        return report_only(chosen.report_only, console)
    values = {each.name: getattr(chosen, each.name) for each in fields(GridOptions)}
    return run_grid_bench(GridOptions(**values), console)
