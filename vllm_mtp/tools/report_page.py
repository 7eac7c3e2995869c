"""The page that `vllm-mtp report` writes: its parts, and how they become HTML.

Everything that comes from a file is plain text here and is escaped by the template;
only drawn figures are markup. The page loads nothing and runs no script, and says so to
the browser (``Content-Security-Policy``).
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from vllm_mtp import __version__
from vllm_mtp.tools.provenance import describe_hardware
from vllm_mtp.tools.report_svg import Draw, as_svg

MAX_UNBROKEN = 32
"""Characters of a cell."""
TEMPLATES = Path(__file__).parents[1] / "assets" / "report"

Tone = Literal["", "good", "bad", "dim"]


class Cell(NamedTuple):
    """Of a table."""

    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class PageTable:
    """A table; the first cell of a row names it.

    Attributes:
        caption: What it is about.
        headers: Of the columns; may be empty.
        rows: As many cells each.
        numeric: Columns that are set to the right.
        note: What its abbreviations mean.
    """

    caption: str
    headers: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numeric: frozenset[int] = frozenset()
    note: str = ""

    @cached_property
    def unbroken(self) -> frozenset[int]:
        """Columns of short texts: better scrolled to than cut into lines."""
        texts = zip(*([cell.text for cell in row] for row in self.rows), strict=True)
        lengths = (max(map(len, column)) for column in texts)
        return frozenset(i for i, n in enumerate(lengths) if n <= MAX_UNBROKEN)

    def classes(self, column: int, tone: Tone = "") -> str:
        """Of a cell, for the style sheet."""
        is_so = {
            "number": column in self.numeric,
            "unbroken": column in self.unbroken,
        }
        return " ".join(filter(None, [tone, *(name for name in is_so if is_so[name])]))


class Picture(NamedTuple):
    """A figure; what it shows also stands in a table."""

    caption: str
    draw: Draw


class Remark(NamedTuple):
    """A sentence below the tables."""

    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class Body:
    """What a renderer makes of a result.

    Attributes:
        summary: One sentence or two, understandable alone.
        tone: Whether that is good or bad news; empty for a mere figure.
        pictures: Drawn when the section is made.
        tables: All figures that matter.
        remarks: What else is to be said.
    """

    summary: str
    tone: Tone = ""
    pictures: Sequence[Picture] = ()
    tables: Sequence[PageTable] = ()
    remarks: Sequence[Remark] = ()


class Fact(NamedTuple):
    """A line of the provenance."""

    name: str
    text: str
    is_code: bool = False


class Origin(NamedTuple):
    """Where a file comes from."""

    name: str
    facts: Sequence[Fact]
    options: str
    """As JSON; empty where the file has none."""


class Drawn(NamedTuple):
    """A picture that is ready for the page."""

    caption: str
    caption_id: str
    svg: Markup


@dataclass(frozen=True)
class Section:
    """A result, or several that belong together."""

    anchor: str
    title: str
    command: str
    meaning: str
    body: Body
    origins: Sequence[Origin]
    drawn: Sequence[Drawn]

    @property
    def num_files(self) -> int:
        """Of the section."""
        return len(self.origins)


def draw_all(pictures: Sequence[Picture], anchor: str) -> list[Drawn]:
    """Draw what there is to draw.

    Args:
        pictures: Of a section.
        anchor: Of the section.
    """
    drawn = []
    for number, picture in enumerate(pictures, 1):
        prefix = f"{anchor}-figure-{number}"
        svg = as_svg(picture.draw, prefix, f"{prefix}-caption")
        if svg is not None:
            drawn.append(Drawn(picture.caption, f"{prefix}-caption", svg))
    return drawn


def origin_of(name: str, content: Mapping[str, Any]) -> Origin:
    """What a result says of its own making.

    Args:
        name: Of the file.
        content: Of the file; one without provenance has no facts.
    """
    provenance = content.get("provenance") or content.get("source") or {}
    options = content.get("options")
    text = json.dumps(options, indent=2, ensure_ascii=False) if options else ""
    return Origin(name, list(_facts(provenance)), text)


def _facts(provenance: Mapping[str, Any]) -> list[Fact]:
    facts = []
    if command := provenance.get("command"):
        facts.append(Fact("command", shlex.join(map(str, command)), is_code=True))
    if time := provenance.get("time_utc"):
        facts.append(Fact("time", str(time)))
    if git := provenance.get("git"):
        dirty = ", with changes that are not committed" if git["is_dirty"] else ""
        facts.append(Fact("commit", f"{git['commit'] or 'none yet'}{dirty}"))
    if versions := provenance.get("versions"):
        known = (f"{name} {each}" for name, each in versions.items() if each)
        facts.append(Fact("versions", ", ".join(known)))
    if hardware := provenance.get("hardware"):
        load = hardware.get("load_average_1min")
        busy = "" if load is None else f"; load average {load} at the start"
        facts.append(Fact("machine", describe_hardware(hardware) + busy))
    return facts


def render_page(sections: Sequence[Section]) -> str:
    """The whole page as HTML.

    Args:
        sections: In the order in which they are shown.
    """
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = Markup((TEMPLATES / "page.css").read_text(encoding="utf-8"))
    page = environment.get_template("page.html.jinja")
    return page.render(sections=sections, style=style, version=__version__)
