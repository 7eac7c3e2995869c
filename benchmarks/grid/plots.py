"""The pictures of the grid benchmark, made from the result as it is in the file."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks.grid.options import PLUS
from benchmarks.grid.race import draft_length, is_static
from benchmarks.grid.summary import over_none
from vllm_mtp.tools.provenance import describe_hardware

PARTS = ("verify", "draft", "rest")


def draw_ratios(result: Mapping[str, Any]) -> Figure:
    """Speed over no speculation in every cell: `mtp_plus` and the static K."""
    cells = sorted(result["cells"], key=_order)
    single = result["overall"]["best_single_static"]
    figure = Figure(figsize=(9, 1.6 + 0.19 * len(cells)), layout="constrained")
    axes = figure.subplots()
    rows = range(len(cells))
    for row, cell in zip(rows, cells, strict=True):
        low, high = cell["plus_over_none"]["quartiles"]
        axes.plot([low, high], [row, row], color="C0", linewidth=1.4)
    series = [
        (
            "best static K of the cell",
            "o",
            "C1",
            [cell["best_static"] for cell in cells],
        ),
        (f"{single} everywhere", "x", "grey", [single] * len(cells)),
        (PLUS, "D", "C0", [PLUS] * len(cells)),
    ]
    for label, marker, colour, names in series:
        axes.scatter(
            [over_none(cell, name) for cell, name in zip(cells, names, strict=True)],
            rows,
            marker=marker,
            facecolors="none" if marker == "o" else colour,
            edgecolors=None if marker == "x" else colour,
            s=26,
            label=label,
            zorder=3,
        )
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(rows, labels=[cell["name"] for cell in cells], fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("decode speed, of no speculation (median; bar: quartiles)")
    axes.set_title(_title(result), fontsize=9)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return figure


def draw_acceptance(result: Mapping[str, Any]) -> Figure:
    """Accepted draft tokens by position, of the longest static K in every cell."""
    cells = result["cells"]
    name = _longest_static(cells)
    temperatures = sorted({cell["temperature"] for cell in cells})
    figure = Figure(figsize=(5 * len(temperatures), 4), layout="constrained")
    for axes, temperature in zip(
        figure.subplots(1, len(temperatures), squeeze=False)[0],
        temperatures,
        strict=True,
    ):
        of_temperature = [c for c in cells if c["temperature"] == temperature]
        _plot_acceptance(axes, of_temperature, name)
        axes.set_title(f"T = {temperature:g}", fontsize=9)
    figure.suptitle(f"{_title(result)}; {name}", fontsize=9)
    return figure


def draw_split(result: Mapping[str, Any]) -> Figure:
    """Milliseconds of a decode step, by concurrency; means over the other axes."""
    cells, names = result["cells"], list(result["overall"]["geometric_means"])
    concurrencies = sorted({cell["concurrency"] for cell in cells})
    figure = Figure(figsize=(3.2 * len(concurrencies) + 1, 4), layout="constrained")
    for axes, concurrency in zip(
        figure.subplots(1, len(concurrencies), squeeze=False)[0],
        concurrencies,
        strict=True,
    ):
        of_concurrency = [c for c in cells if c["concurrency"] == concurrency]
        _plot_split(axes, of_concurrency, names)
        axes.set_title(f"{concurrency} at a time", fontsize=9)
    figure.axes[0].set_ylabel("ms of a decode step (instrumented)")
    figure.axes[0].legend(fontsize=8)
    figure.suptitle(_title(result), fontsize=9)
    return figure


def _plot_acceptance(axes: Axes, cells: Sequence[Mapping[str, Any]], name: str) -> None:
    for index, workload in enumerate(dict.fromkeys(c["workload"] for c in cells)):
        lists = [
            cell["contenders"][name]["acceptance_per_position"]
            for cell in cells
            if cell["workload"] == workload
        ]
        means = [
            sum(values) / len(values)
            for column in zip(*lists, strict=False)
            if (values := [value for value in column if value is not None])
        ]
        positions = range(1, len(means) + 1)
        axes.plot(positions, means, "o-", color=f"C{index}", label=workload, ms=4)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _plot_split(
    axes: Axes, cells: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> None:
    splits = {
        name: [
            split
            for cell in cells
            if (split := cell["contenders"].get(name, {}).get("split_ms"))
        ]
        for name in names
    }
    bottoms = [0.0] * len(names)
    for part in PARTS:
        heights = [
            sum(split[part] for split in splits[name]) / max(1, len(splits[name]))
            for name in names
        ]
        axes.bar(range(len(names)), heights, bottom=bottoms, label=part)
        bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
    labels = [name.removeprefix("mtp ") for name in names]
    axes.set_xticks(range(len(names)), labels=labels, rotation=70, fontsize=7)


def _longest_static(cells: Sequence[Mapping[str, Any]]) -> str:
    everywhere = set.intersection(*(set(cell["contenders"]) for cell in cells))
    longest: str = max(filter(is_static, everywhere), key=draft_length)
    return longest


def _order(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    keys = ("workload", "temperature", "context", "concurrency")
    return tuple(cell[key] for key in keys)


def _title(result: Mapping[str, Any]) -> str:
    hardware = result["provenance"]["hardware"]
    return f"{describe_hardware(hardware)}; {result['options']['dtype']}"
