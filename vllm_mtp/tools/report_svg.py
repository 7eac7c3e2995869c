"""Figures of matplotlib as SVG inside a page, in the page's own colours.

An SVG that stands in the HTML inherits its style sheet, so a figure's colours become
the page's variables and follow it into the dark and onto paper. Text is drawn as
outlines: the same on every machine, whatever fonts it has.
"""

import re
import warnings
from collections.abc import Callable
from io import StringIO

import matplotlib.style
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter, Formatter, FuncFormatter

MAX_TEXT_CHARACTERS, MAX_TICK_CHARACTERS = 100, 40
"""A longer name would leave no room for what is drawn; tables show it whole."""
POINTS_PER_INCH = 72
PIXELS_PER_POINT = 4 / 3
SMALLEST, LARGEST = 0.7, 1.2
"""Of its natural size: a figure follows the width of the window in between, and is
scrolled where that is less."""

CATEGORICAL = (
    "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd",
    "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf",
)  # fmt: skip
"""matplotlib's C0 to C9."""
PAGE_COLOURS = {
    "#000000": "currentColor",
    "#ffffff": "var(--paper)",
    "#808080": "var(--muted)",  # grey
    "#b0b0b0": "var(--muted)",  # lines of a grid, which are also transparent
    "#cccccc": "var(--rule)",  # the box of a legend
} | {colour: f"var(--c{index})" for index, colour in enumerate(CATEGORICAL)}
"""Every other colour of a figure stays as it is."""

STYLE = {
    "svg.fonttype": "path",
    "svg.hashsalt": "vllm-mtp",  # the same figure gives the same text
    "text.parse_math": False,  # a `$` in a model's name is a `$`
    "axes.spines.top": False,
    "axes.spines.right": False,
}

Draw = Callable[[], Figure | None]


def as_svg(draw: Draw, prefix: str, caption_id: str) -> Markup | None:
    """Draw a figure.

    Args:
        draw: Makes it; it may find that there is nothing to draw.
        prefix: Of all ids in it, so that several fit into one page.
        caption_id: Id of the element that describes it.

    Returns:
        An ``<svg>`` that needs nothing else, or None for nothing.
    """
    # Whatever the user's own matplotlibrc says.
    with matplotlib.style.context(["default", STYLE]), warnings.catch_warnings():
        # Fonts without a sign of somebody's name, labels too long for their place.
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", RuntimeWarning)  # numbers beyond all scales
        figure = draw()
        if figure is None:
            return None
        _cut_texts(figure)
        written = StringIO()
        # Without date and creator: the same figure, the same bytes.
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(written, format="svg", transparent=True, metadata=nothing)
    width, height = figure.get_size_inches() * POINTS_PER_INCH
    pixels = width * PIXELS_PER_POINT
    opening = (
        f'<svg class="plot" role="img" aria-labelledby="{caption_id}" '
        f'viewBox="0 0 {width:g} {height:g}" '
        f'style="max-width:{LARGEST * pixels:.0f}px;'
        f'min-width:{SMALLEST * pixels:.0f}px">'
    )
    return Markup(opening + _for_page(written.getvalue(), prefix))


def _cut_texts(figure: Figure) -> None:
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_text(_short(text.get_text(), MAX_TEXT_CHARACTERS))
    # Names at an axis are set anew while it is drawn, by its formatter.
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            formatter = axis.get_major_formatter()
            if isinstance(formatter, FuncFormatter | FixedFormatter):
                axis.set_major_formatter(_cut_by(formatter))


def _cut_by(formatter: Formatter) -> FuncFormatter:
    def cut(value: float, position: int | None = None) -> str:
        return _short(formatter(value, position), MAX_TICK_CHARACTERS)

    return FuncFormatter(cut)


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _for_page(svg: str, prefix: str) -> str:
    """What stands inside of matplotlib's ``<svg>``."""
    # The text of every label stands in a comment beside its outlines.
    svg = re.sub(r"<!--.*?-->\s*|<style.*?</style>\s*", "", svg, flags=re.DOTALL)
    _, body = re.split(r"(?<=>)", svg[svg.index("<svg") :], maxsplit=1)
    body = re.sub(r'(\sid="|xlink:href="#|url\(#)', rf"\g<1>{prefix}-", body)
    body = body.replace("xlink:href", "href")
    colours = "|".join(PAGE_COLOURS)
    return re.sub(colours, lambda found: PAGE_COLOURS[found[0]], body)
