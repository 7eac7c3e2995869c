"""What a person sees of a replay: a table and three pictures.

All are made from the result as it is written to the file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, StrMethodFormatter
from rich import box
from rich.console import Console
from rich.table import Table

from vllm_mtp.tools.provenance import replacing

DPI = 130
_FORMERLY = "share_of_probes"
"""Of the same in results before the controller was renewed."""
MAX_DEPTH_PANELS = 3
RUN_COLUMNS = (
    "over\nK=0",
    "over\nbest K",
    "best\nK",
    "regret\n%",
    "after\nchange",
    "moves",
    "explored\n%",
)


def print_report(result: Mapping[str, Any], console: Console) -> None:
    """Print worlds by controllers, and the targets."""
    console.print(_run_table(result))
    if result["targets"]:
        console.print(_target_table(result))


def write_plots(result: Mapping[str, Any], folder: Path) -> list[str]:
    """Draw the pictures, each whole or not at all.

    Returns:
        Names of the files.
    """
    figures = {
        "replay-regret.png": draw_regret(result),
        "replay-depth.png": draw_depths(result),
        "replay-cost.png": draw_costs(result),
    }
    drawn = {name: figure for name, figure in figures.items() if figure is not None}
    for name, figure in drawn.items():
        with replacing(folder / name) as pending:
            figure.savefig(pending, format="png", dpi=DPI)
    return list(drawn)


def _run_table(result: Mapping[str, Any]) -> Table:
    options = result["options"]
    table = Table(
        title=f"{options['steps']} steps, {len(options['seeds'])} seed(s)",
        caption="best K: the best one that never changes. Regret: the share of time "
        "that the oracle would not have needed; after change: within "
        f"{options['steps_after_a_change']} steps of each change. Moves: of the depth, "
        "without explorations.",
        caption_justify="left",
        box=box.SIMPLE_HEAVY,
        padding=(0, 1, 0, 0),
        show_edge=False,
        pad_edge=False,
    )
    table.add_column("world", no_wrap=True)
    table.add_column("controller", no_wrap=True)
    for header in RUN_COLUMNS:
        table.add_column(header, justify="right")
    last = None
    for run in result["runs"]:
        if last not in (None, run["world"]) and len(options["controllers"]) > 1:
            table.add_section()
        after = run["regret_after_changes"]
        table.add_row(
            "" if run["world"] == last else run["world"],
            run["controller"],
            f"{run['over_no_drafts']:.2f}",
            f"{run['over_best_static']:.3f}",
            str(run["best_static_draft_length"]),
            f"{100 * run['regret']:.2f}",
            "-" if after is None else f"{100 * after:.2f}",
            f"{run['switches']:.0f}",
            f"{100 * run.get('share_of_exploration', run.get(_FORMERLY, 0.0)):.1f}",
        )
        last = run["world"]
    return table


def _target_table(result: Mapping[str, Any]) -> Table:
    table = Table(title="Targets: the worst world", box=box.SIMPLE_HEAVY)
    table.add_column("target")
    for header in ("limit", "measured"):
        table.add_column(header, justify="right")
    table.add_column("world", no_wrap=True)
    table.add_column("")
    for target in result["targets"]:
        table.add_row(
            target["name"],
            f"<= {100 * target['limit']:.0f} %",
            f"{100 * target['value']:.2f} %",
            target["world"],
            "[green]pass" if target["passed"] else "[bold red]FAIL",
        )
    return table


def draw_regret(result: Mapping[str, Any]) -> Figure:
    """Regret of every controller in every world."""
    worlds = list(dict.fromkeys(run["world"] for run in result["runs"]))
    controllers = result["options"]["controllers"]
    figure = Figure(figsize=(9, 1.6 + 0.34 * len(worlds)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(controllers)
    for index, controller in enumerate(controllers):
        runs = [run for run in result["runs"] if run["controller"] == controller]
        places = [worlds.index(run["world"]) + index * height for run in runs]
        axes.barh(places, [r["regret"] for r in runs], height, label=controller)
        for place, run in zip(places, runs, strict=True):
            each = run["regret_of_each_seed"]
            axes.plot([min(each), max(each)], [place, place], color="black", lw=0.8)
    axes.axvline(result["options"]["regret_limit"], color="black", ls=":", lw=1)
    middle = (len(controllers) - 1) * height / 2
    axes.set_yticks([i + middle for i in range(len(worlds))], labels=worlds)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("regret against the oracle (lines: range over seeds)")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8)
    figure.suptitle("Time lost against the best draft length at every step")
    return figure


def draw_depths(result: Mapping[str, Any]) -> Figure | None:
    """Depths step by step where something changes; None where nothing does."""
    runs = [run for run in result["runs"] if run["first_seed"] is not None]
    runs = runs[:: len(result["options"]["controllers"])][:MAX_DEPTH_PANELS]
    if not runs:
        return None
    figure = Figure(figsize=(11, 2.6 * len(runs) + 0.6), layout="constrained")
    panels = figure.subplots(len(runs), 1, squeeze=False)[:, 0]
    for axes, run in zip(panels, runs, strict=True):
        _plot_depths(axes, run)
    panels[-1].set_xlabel("step")
    figure.suptitle("Draft depth: chosen and the oracle's")
    return figure


def _plot_depths(axes: Axes, run: Mapping[str, Any]) -> None:
    series = run["first_seed"]
    steps = series["steps"]
    axes.step(steps, series["oracle_depths"], color="C1", lw=1.2, label="oracle")
    axes.step(
        steps, series["depths"], color="C0", lw=0.7, alpha=0.8, label=run["controller"]
    )
    for change in series["changes"]:
        if change <= steps[-1]:
            axes.axvline(change, color="black", ls=":", lw=1)
    axes.set_title(run["world"], fontsize=10)
    axes.set_ylabel("draft depth")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper right")


def draw_costs(result: Mapping[str, Any]) -> Figure:
    """Time of a target pass over rows, of all modelled machines."""
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    costs = result["costs"]
    for name, times_ms in costs["verify_ms"].items():
        axes.plot(costs["rows"], times_ms, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.set_xlabel("rows that the target verifies")
    axes.set_ylabel("milliseconds")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    context = costs["context_tokens"]
    axes.set_title(f"Time of a target pass, {context:,} tokens of context, models")
    return figure
