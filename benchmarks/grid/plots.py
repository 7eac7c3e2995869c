"""The picture of the grid benchmark, made from the result as it is in the file."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from benchmarks.grid.options import PLUS
from benchmarks.grid.summary import over_none
from vllm_mtp.tools.provenance import describe_hardware


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


def _order(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    keys = ("workload", "temperature", "context", "concurrency")
    return tuple(cell[key] for key in keys)


def _title(result: Mapping[str, Any]) -> str:
    hardware = result["provenance"]["hardware"]
    return f"{describe_hardware(hardware)}; {result['options']['dtype']}"
