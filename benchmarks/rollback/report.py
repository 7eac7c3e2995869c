"""What a person sees of the rollback benchmark: the tables and the picture.

Both are made from the result as it is written to the file, so they show nothing that is
not in it.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, StrMethodFormatter
from rich import box
from rich.console import Console
from rich.table import Table

from vllm_mtp.tools.provenance import replacing

STYLES = {"native": "-", "triton": "-.", "reference": ":", "torch_indexing": "--"}
TITLES = {"vllm_chain": "vLLM's chain", "torch_indexing": "torch indexing"}
BAND_ALPHA = 0.2
DPI = 130


def print_report(result: Mapping[str, Any], console: Console) -> None:
    """Print the sweep over batches and the targets; the file holds the rest."""
    console.print(_metadata_table(result))
    console.print(_payload_table(result))
    console.print(_target_table(result))
    for part in ("backends", "layouts"):
        for name, reason in result[part]["left_out"].items():
            console.print(f"Not measured: {name}: {reason}", style="dim", markup=False)


def write_plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw both sweeps over batches into a PNG, whole or not at all."""
    with replacing(path) as pending:
        draw_rollback(result).savefig(pending, format="png", dpi=DPI)


def draw_rollback(result: Mapping[str, Any]) -> Figure:
    """Both sweeps over batches: metadata on the left, payload on the right."""
    figure = Figure(figsize=(13, 6.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    centre = result["centre"]
    figure.suptitle(f"KV rollback on {_device_title(result)}")
    _plot_metadata(left, result)
    left.set_title(f"Metadata, K={centre['draft_length']}: {_clock(result)}")
    _plot_payload(right, result)
    right.set_title(
        f"Payload, K={centre['draft_length']}, {centre['layers']} layers, "
        "all drafts rejected"
    )
    return figure


def _metadata_sweep(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    length = result["centre"]["draft_length"]
    return [each for each in result["metadata"] if each["draft_length"] == length]


def _payload_sweep(result: Mapping[str, Any], layout: str) -> list[dict[str, Any]]:
    centre = result["centre"]
    wanted = (layout, centre["draft_length"], centre["layers"], "all")
    axes = ("layout", "draft_length", "layers", "rejected")
    cases = result["payload"]
    return [each for each in cases if tuple(each[axis] for axis in axes) == wanted]


def _metadata_table(result: Mapping[str, Any]) -> Table:
    cases = _metadata_sweep(result)
    names = list(cases[0]["contenders"])
    length = result["centre"]["draft_length"]
    table = Table(
        title=f"Metadata rollback, us (K={length}; median, {_clock(result)})",
        box=box.SIMPLE_HEAVY,
        pad_edge=False,
    )
    for header in ("batch", *map(_title, names), "as called\n/ vLLM's chain"):
        table.add_column(header, justify="right")
    for case in cases:
        ratio = case["as_called_over_chain"]
        figures = [_figure(_best_us(case["contenders"][name])) for name in names]
        table.add_row(
            str(case["batch"]), *figures, _figure(ratio["median"]) if ratio else "-"
        )
    return table


def _payload_table(result: Mapping[str, Any]) -> Table:
    names = list(_names(each["contenders"] for each in result["payload"]))
    centre = result["centre"]
    table = Table(
        title=f"Payload rollback, us and share of copy bandwidth (K="
        f"{centre['draft_length']}, {centre['layers']} layers, all drafts rejected)",
        box=box.SIMPLE_HEAVY,
        pad_edge=False,
    )
    table.add_column("layout", no_wrap=True)
    for header in ("batch", "MB zeroed", *map(_title, names)):
        table.add_column(header, justify="right")
    for layout in result["layouts"]["measured"]:
        for case in _payload_sweep(result, layout):
            table.add_row(
                layout,
                str(case["batch"]),
                _figure(case["zeroed_bytes"] / 1e6),
                *(_time_and_share(case["contenders"].get(name)) for name in names),
            )
        table.add_section()
    return table


def _target_table(result: Mapping[str, Any]) -> Table:
    table = Table(title="Targets", box=box.SIMPLE_HEAVY, pad_edge=False)
    table.add_column("target")
    for header in ("limit", "measured"):
        table.add_column(header, justify="right")
    table.add_column("")
    verdicts = {True: "[green]pass", False: "[bold red]FAIL", None: "[dim]-"}
    for target in result["targets"]:
        value = target["value"]
        table.add_row(
            target["name"],
            f"{target['comparison']} {target['limit']:g}",
            "-" if value is None else _figure(value),
            f"{verdicts[target['passed']]}[/] {target['why_not_judged'] or ''}",
        )
    return table


def _plot_metadata(axes: Axes, result: Mapping[str, Any]) -> None:
    cases = _metadata_sweep(result)
    for index, name in enumerate(cases[0]["contenders"]):
        spreads = [_spread_us(case["contenders"][name]) for case in cases]
        style = "--" if name == "vllm_chain" else "-"
        style = ":" if name == "reference" else style
        _plot_line(axes, cases, spreads, (_title(name), f"C{index}", style))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.set_ylabel("microseconds")
    _finish(axes, cases)


def _plot_payload(axes: Axes, result: Mapping[str, Any]) -> None:
    copy = result["copy_bandwidth"]["gb_per_s"]["median"]
    for index, (layout, title) in enumerate(result["layouts"]["measured"].items()):
        cases = _payload_sweep(result, layout)
        for name in _names(each["contenders"] for each in cases):
            if name == "reference":
                continue  # too slow for all but the smallest cases
            timed = [case for case in cases if name in case["contenders"]]
            spreads = [
                _fractions(_spread_us(case["contenders"][name]), case, copy)
                for case in timed
            ]
            label = f"{title}: {_title(name)}"
            style = (label, f"C{index}", STYLES.get(name, "-"))
            _plot_line(axes, timed, spreads, style)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel(f"zeroed bytes/s as a share of the copy's {copy:,.0f} GB/s")
    _finish(axes, cases)


def _plot_line(
    axes: Axes,
    cases: list[dict[str, Any]],
    spreads: list[tuple[float, float, float]],
    style: tuple[str, str, str],
) -> None:
    """Median and the band between the quartiles, over batches."""
    label, colour, line = style
    batches = [case["batch"] for case in cases]
    lower, median, upper = zip(*spreads, strict=True)
    axes.plot(batches, median, line, color=colour, marker="o", ms=3.5, label=label)
    axes.fill_between(
        batches, lower, upper, color=colour, alpha=BAND_ALPHA, linewidth=0
    )


def _finish(axes: Axes, cases: list[dict[str, Any]]) -> None:
    batches = [case["batch"] for case in cases]
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, labels=map(str, batches))
    axes.set_xticks([], minor=True)
    axes.set_xlabel("batch (requests of a step)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def _spread_us(contender: Mapping[str, Any]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    spread = contender["device_us"] or contender["host_us"]
    lower, upper = spread["quartiles"]
    return lower, spread["median"], upper


def _fractions(
    spread_us: tuple[float, float, float], case: Mapping[str, Any], copy: float
) -> tuple[float, float, float]:
    fast, median, slow = (case["zeroed_bytes"] / us / 1e3 / copy for us in spread_us)
    return slow, median, fast


def _best_us(contender: Mapping[str, Any]) -> float:
    return _spread_us(contender)[1]


def _time_and_share(contender: Mapping[str, Any] | None) -> str:
    if contender is None:
        return "-"
    share = 100 * contender["copy_fraction"]
    return f"{_figure(_best_us(contender))} {share:3.0f}%"


def _clock(result: Mapping[str, Any]) -> str:
    on_gpu = result["device"]["type"] == "cuda"
    return "device time" if on_gpu else "host time"


def _device_title(result: Mapping[str, Any]) -> str:
    device, versions = result["device"], result["provenance"]["versions"]
    name, num_threads = device["name"], device["num_threads"]
    if device["type"] == "cpu":
        name += f", {num_threads} thread{'s' if num_threads > 1 else ''}"
    return f"{name}; vLLM {versions['vllm']}, torch {versions['torch']}"


def _names(contenders: Iterable[Mapping[str, Any]]) -> dict[str, None]:
    """Names of all contenders, each once, in order."""
    return {name: None for each in contenders for name in each}


def _title(name: str) -> str:
    return TITLES.get(name, name.replace("_", " "))


def _figure(value: float) -> str:
    """Three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
