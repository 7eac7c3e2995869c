"""From what commands print to tables and sentences of a page."""

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_mtp.tools.report_page import Cell, PageTable
from vllm_mtp.tools.report_tables import from_rich, printed


def table() -> Table:
    made = Table(title="A  title", caption="a\nnote")
    made.add_column("name")
    made.add_column("over\nK=0", justify="right")
    made.add_column("verdict")
    return made


def test_words_and_alignment_are_those_of_the_terminal() -> None:
    made = table()
    made.add_row("a", "1.5", "text")
    found = from_rich(made)
    assert found.caption == "A title"
    assert found.headers == ("name", "over K=0", "verdict")
    assert found.note == "a note"
    assert found.rows == ((Cell("a"), Cell("1.5"), Cell("text")),)
    assert found.numeric == {1}


@pytest.mark.parametrize(
    ("printed_as", "expected"),
    [
        ("[green]reached[/]", Cell("reached", "good")),
        ("[bold red]MISSED[/] in x", Cell("MISSED in x", "bad")),
        ("1.5 \\[1.4..1.6]", Cell("1.5 [1.4..1.6]")),
        ("[magenta]a name[/nobody]", Cell("[magenta]a name[/nobody]")),
        ("<b>[0]</b>", Cell("<b>[0]</b>")),
    ],
)
def test_only_our_own_markup_is_markup(printed_as: str, expected: Cell) -> None:
    made = table()
    made.add_row("a", "1", printed_as)
    assert from_rich(made).rows[0][2] == expected


def test_a_row_in_red_is_bad_news() -> None:
    made = table()
    made.add_row("a", "1", "2", style="red")
    assert {cell.tone for cell in from_rich(made).rows[0]} == {"bad"}


def test_every_row_has_a_name() -> None:
    made = table()
    for name in ("a", "", "b"):
        made.add_row(name, "1", "2")
    assert [row[0].text for row in from_rich(made).rows] == ["a", "a", "b"]


def test_columns_of_numbers_stand_right_though_the_terminal_has_them_left() -> None:
    made = table()
    for number in ("1,209", "12.6%", "-", "1e-05 !"):
        made.add_row("a", "x", number)
    assert from_rich(made).numeric == {1, 2}
    made.add_row("a", "x", "a word")
    assert from_rich(made).numeric == {1}


def test_short_cells_stay_on_their_line() -> None:
    rows = ((Cell("short"), Cell("long " * 20)),)
    found = PageTable("t", ("a", "b"), rows)
    assert found.unbroken == {0}
    assert found.classes(0, "bad") == "bad unbroken"
    assert found.classes(1) == ""


def test_sentences_keep_their_colour() -> None:
    def show(console: Console) -> None:
        console.print("[dim]aside[/]")
        console.print("no", style="bold red")
        console.print(Text("plain"))
        console.print(table())

    found = printed(show)
    tones = [(each.text, each.tone) for each in found.remarks]
    assert tones == [("aside", "dim"), ("no", "bad"), ("plain", "")]
    assert len(found.tables) == 1
