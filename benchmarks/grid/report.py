"""The tables of the grid benchmark, made from the result as it is in the file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.grid.options import PLUS
from benchmarks.grid.plots import draw_ratios
from vllm_mtp.tools.engine_process import NO_SPECULATION
from vllm_mtp.tools.provenance import replacing

DPI = 130


def print_report(result: Mapping[str, Any], console: Console) -> None:
    """Print cells, geometric means, the time split and the targets."""
    if not result["cells"]:
        console.print("No cell has been measured by all contenders yet.")
        return
    console.print(_cell_table(result))
    console.print(_split_table(result))
    console.print(_overall_table(result))
    console.print(_target_table(result))
    for line in _remarks(result):
        console.print(line, markup=False)


def write_plots(result: Mapping[str, Any], stem: Path) -> list[Path]:
    """Draw the ratios beside the result; nothing where there is nothing to draw."""
    if not result["cells"]:
        return []
    path = Path(f"{stem}-ratios.png")
    with replacing(path) as pending:
        draw_ratios(result).savefig(pending, format="png", dpi=DPI)
    return [path]


def _cell_table(result: Mapping[str, Any]) -> Table:
    table = _table("Decode speed: medians of ratios that are paired within each repeat")
    table.add_column("cell", no_wrap=True)
    headers = (
        "none\ntok/s",
        "best\nstatic",
        "best\n/none",
        "plus\n/none",
        "plus\n/best",
        "quartiles",
        "whole\nround",
        "plus\nK",
    )
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for cell in result["cells"]:
        contenders = cell["contenders"]
        best, plus = contenders[cell["best_static"]], contenders[PLUS]
        over_best = cell["plus_over_best_static"]
        table.add_row(
            cell["name"],
            f"{contenders[NO_SPECULATION]['tokens_per_s']['median']:.0f}",
            cell["best_static"].removeprefix("mtp "),
            f"{best['over_none']['median']:.2f}",
            f"{cell['plus_over_none']['median']:.3f}",
            f"{over_best['median']:.3f}",
            "{:.2f}..{:.2f}".format(*over_best["quartiles"]),
            _whole_rounds_text(plus),
            f"{plus['mean_draft_length']:.1f}",
        )
    table.caption = (
        "none: no speculation; best static: the fastest K of vLLM's mtp; plus: "
        "mtp_plus; quartiles: of plus/best; whole round: plus/none with prompts, of "
        "runs with --whole-requests"
    )
    return table


def _whole_rounds_text(contender: Mapping[str, Any]) -> str:
    ratio = contender.get("whole_over_none")
    return "-" if ratio is None else f"{ratio['median']:.3f}"


def _split_table(result: Mapping[str, Any]) -> Table:
    table = _table("Where a decode step's milliseconds go (instrumented warm-up)")
    table.add_column("cell", no_wrap=True)
    for header in ("no speculation", "best static K", "mtp_plus"):
        table.add_column(header, justify="right", no_wrap=True)
    share = result["overall"]["metrics_share"]
    table.caption = "verify+draft+rest" + (
        "" if share is None else f"; counting for metrics is {share:.2%} of a step"
    )
    for cell in result["cells"]:
        names = (NO_SPECULATION, cell["best_static"], PLUS)
        splits = [cell["contenders"][name]["split_ms"] for name in names]
        table.add_row(cell["name"], *map(_split_text, splits))
    return table


def _split_text(split: Mapping[str, float] | None) -> str:
    if split is None:
        return "-"
    rest = split["rest"] + split.get("metrics", 0.0)
    return f"{split['verify']:.1f}+{split['draft']:.1f}+{rest:.1f}"


def _overall_table(result: Mapping[str, Any]) -> Table:
    table = _table("Geometric mean over the grid, of no speculation")
    table.add_column("contender")
    table.add_column("decode", justify="right")
    overall = result["overall"]
    for name, mean in overall["geometric_means"].items():
        is_best = name == overall["best_single_static"]
        bound = "<= " if name in overall["at_most"] else ""
        table.add_row(
            f"{name}{' (best static)' if is_best else ''}", f"{bound}{mean:.3f}"
        )
    pairs = {
        "without speculation": overall["again_over_none"],
        f"with {PLUS}": overall.get("plus_again_over_plus"),
    }
    table.caption = "; ".join(
        f"two engines {what} differ: {min(again['each']):.3f} to "
        f"{max(again['each']):.3f} over the cells"
        for what, again in pairs.items()
        if again is not None
    )
    return table


def _target_table(result: Mapping[str, Any]) -> Table:
    table = _table("Targets")
    table.add_column("target")
    table.add_column("at least", justify="right")
    table.add_column("measured", justify="right")
    table.add_column("")
    for target in result["targets"]:
        verdict = "[green]reached" if target["is_reached"] else "[bold red]MISSED"
        where = ""
        if target["num_cells_missed"]:
            where = (
                f" in {target['num_cells_missed']} of {len(result['cells'])} cells, in "
                f"{target['num_cells_clearly_missed']} by more than chance; "
                f"worst: {target['worst_cell']}"
            )
        table.add_row(
            target["name"],
            f"{target['limit']:.2f}",
            f"{target['value']:.3f}",
            f"{verdict}[/]{where}",
        )
    return table


def _text_remark(result: Mapping[str, Any]) -> list[str]:
    greedy = [c for c in result["cells"] if c["identical_texts"] is not None]
    if not greedy:
        return []
    differing = [cell["name"] for cell in greedy if not cell["identical_texts"]]
    agree = len(greedy) - len(differing)
    line = f"Same greedy texts from all contenders in {agree} of {len(greedy)} cells"
    if differing and not result["is_exact"]:
        line += " (near-ties may flip in a shorter format than float32)"
    return [line + (f"; not in: {', '.join(differing)}" if differing else "")]


def _remarks(result: Mapping[str, Any]) -> list[str]:
    lines = _text_remark(result)
    lowest = result["overall"]["lowest_acceptance"]
    if lowest:
        lines.append(
            f"Lowest acceptance: {100 * lowest['accepted']:.1f} % of first draft "
            f"tokens, in {lowest['cell']}"
        )
    if any(engine["has_mended_sampling"] for engine in result["engines"].values()):
        lines.append(
            "All contenders ran with vLLM's faulty CPU sampling kernel mended; vLLM's "
            "own mtp at T > 0 is comparable only so."
        )
    if result["num_sessions"] > 1:
        lines.append(
            f"Measured in {result['num_sessions']} sessions; ratios are of one "
            "each, and mtp_plus began each anew."
        )
    preempted = [
        cell["name"]
        for cell in result["cells"]
        if any(each["num_preempted"] for each in cell["contenders"].values())
    ]
    if preempted:
        lines.append(f"Requests were preempted in: {', '.join(preempted)}")
    return lines


def _table(title: str) -> Table:
    # Without padding to fit 80 columns; the box has a space between them.
    return Table(title=title, box=box.SIMPLE_HEAVY, pad_edge=False, padding=(0, 0))
