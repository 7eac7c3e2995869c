"""Pictures that the commands themselves do not draw."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from vllm_mtp.tools.eval_report import Share

DODGE, MAX_DODGE = 0.7, 0.12
"""Share of the room of a place that the marks of all series take; most between two."""


class Series(NamedTuple):
    """Figures of one evaluation, None where nothing was tested."""

    label: str
    shares: Sequence[Share | None]


def draw_positions(series: Sequence[Series]) -> Figure:
    """Acceptance over the position in the draft, with intervals."""
    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.subplots()
    for index, each in enumerate(series):
        _plot_series(axes, each, index, len(series), is_upright=True)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(0.5, max(len(each.shares) for each in series) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted if reached")
    axes.grid(axis="y", alpha=0.3)
    _legend(figure, series)
    return figure


def draw_categories(names: Sequence[str], series: Sequence[Series]) -> Figure:
    """Acceptance length of each category, with intervals."""
    rows = len(names) * max(1.0, 0.45 * len(series))
    figure = Figure(figsize=(7, 1.3 + 0.32 * rows), layout="constrained")
    axes = figure.subplots()
    for index, each in enumerate(series):
        _plot_series(axes, each, index, len(series), is_upright=False)
    axes.set_yticks(range(1, len(names) + 1), labels=names)
    axes.set_ylim(len(names) + 0.6, 0.4)
    axes.set_xlabel("acceptance length (tokens a step)")
    axes.grid(alpha=0.3)
    _legend(figure, series)
    return figure


def _plot_series(
    axes: Axes, series: Series, index: int, num_series: int, *, is_upright: bool
) -> None:
    shift = min(DODGE / num_series, MAX_DODGE) * (index - (num_series - 1) / 2)
    places = [i + shift for i, s in enumerate(series.shares, 1) if s is not None]
    shares = [share for share in series.shares if share is not None]
    values = [share.value for share in shares]
    errors = [
        [share.value - share.low for share in shares],
        [share.high - share.value for share in shares],
    ]
    points = (places, values) if is_upright else (values, places)
    axes.errorbar(
        *points,
        xerr=None if is_upright else errors,
        yerr=errors if is_upright else None,
        fmt="o",
        color=f"C{index}",
        ms=5,
        lw=1.6,
        label=series.label,
    )


def _legend(figure: Figure, series: Sequence[Series]) -> None:
    if len(series) > 1:
        figure.legend(loc="outside upper center", ncols=3, fontsize=9)


def draw_spreads(
    spreads: Mapping[str, Mapping[str, Any]], label: str, reference: float | None
) -> Figure:
    """Every repeat of each contender, with median and quartiles.

    Args:
        spreads: ``{median, quartiles, each}`` of each contender.
        label: Of the axis.
        reference: Where what they are compared with stands.
    """
    figure = Figure(figsize=(7, 1.1 + 0.42 * len(spreads)), layout="constrained")
    axes = figure.subplots()
    for row, spread in enumerate(spreads.values()):
        low, high = spread["quartiles"]
        each = spread["each"]
        axes.plot(each, [row] * len(each), "o", color="C0", ms=4, alpha=0.35)
        axes.plot([low, high], [row, row], color="C0", lw=2)
        axes.plot([spread["median"]], [row], "D", color="C0", ms=7)
    if reference is not None:
        axes.axvline(reference, color="grey", lw=1, ls="--")
    axes.set_yticks(range(len(spreads)), labels=list(spreads))
    axes.set_ylim(len(spreads) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel(label)
    return figure


def draw_probe(probe: Mapping[str, Any]) -> Figure:
    """Predicted speedup and acceptance length over the draft length."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    lengths = [each["draft_length"] for each in probe["lengths"]]
    for index, (key, label) in enumerate(
        {
            "predicted_speedup": "predicted speedup",
            "acceptance_length": "acceptance length",
        }.items()
    ):
        values = [each[key] for each in probe["lengths"]]
        style = "o-" if index == 0 else "o:"
        axes.plot(lengths, values, style, color=f"C{index}", label=label)
    axes.axhline(1.0, color="grey", ls="--", lw=1)
    axes.axvline(probe["best_draft_length"], color="C0", alpha=0.3, lw=6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("draft length K (the bar: predicted best)")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def draw_coverage(coverage: Sequence[float]) -> Figure:
    """Share of the counted tokens over the rows of a draft vocabulary."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(coverage) + 1), coverage)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda rows, _: f"{rows:,.0f}"))
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("rows of the draft head")
    axes.set_ylabel("of the counted tokens")
    axes.grid(alpha=0.3)
    return figure
