"""What a command prints in a terminal, as tables and sentences of a page.

The commands print from the very dictionaries that they write, so the page shows the
same figures in the same words.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from vllm_mtp.tools.report_page import Cell, PageTable, Remark, Tone

TONES: dict[str, Tone] = {
    "green": "good",
    "bold green": "good",
    "red": "bad",
    "bold red": "bad",
    "dim": "dim",
}
"""Of the styles that our tables use."""
MARKUP = re.compile(rf"\[({'|'.join(TONES)}|/)\]")
"""Other brackets are text: names of models and files may hold them."""
NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)? ?%?( !)?|-")
"""A cell of a column that is set to the right on a page, though not in a terminal."""


class Printed(NamedTuple):
    """What was printed."""

    tables: list[PageTable]
    remarks: list[Remark]


class _Collector(Console):
    """A console that keeps what is printed instead of showing it."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.printed = Printed([], [])

    def print(self, *objects: Any, **options: Any) -> None:
        for each in objects:
            if isinstance(each, Table):
                self.printed.tables.append(from_rich(each))
            else:
                cell = _cell(each)
                tone = cell.tone or TONES.get(str(options.get("style")), "")
                self.printed.remarks.append(Remark(cell.text, tone))


def printed(show: Callable[[Console], None]) -> Printed:
    """Let a command print, and keep it.

    Args:
        show: Prints on the console that it is given.
    """
    console = _Collector()
    show(console)
    return console.printed


def from_rich(table: Table) -> PageTable:
    """A table of the terminal; a name that is left out there is that of the row above.

    Args:
        table: With as many cells in each column.
    """
    cells = [list(column.cells) for column in table.columns]
    rows: list[tuple[Cell, ...]] = []
    for row, found in zip(table.rows, zip(*cells, strict=True), strict=True):
        name, *others = (_cell(each, str(row.style or "")) for each in found)
        rows.append((name if name.text or not rows else rows[-1][0], *others))
    return PageTable(
        caption=_plain(table.title),
        headers=tuple(_plain(column.header) for column in table.columns),
        rows=tuple(rows),
        numeric=frozenset(i for i, c in enumerate(table.columns) if _is_numeric(c)),
        note=_plain(table.caption),
    )


def _is_numeric(column: Column) -> bool:
    texts = [_cell(each).text for each in column.cells]
    return column.justify == "right" or (
        bool(texts) and all(map(NUMBER.fullmatch, texts))
    )


def _cell(content: Any, row_style: str = "") -> Cell:
    text = content.plain if isinstance(content, Text) else str(content)
    styles = [name for name in MARKUP.findall(text) if name != "/"]
    tone = TONES.get(styles[0] if styles else row_style, "")
    return Cell(MARKUP.sub("", text).replace("\\[", "["), tone)


def _plain(content: Any) -> str:
    # Line breaks were put in for narrow terminals.
    return " ".join(_cell(content).text.split()) if content else ""
