"""Figures inside a page: its colours, its ids, nobody's fonts or settings."""

import re
from collections import Counter

import matplotlib
import pytest
from matplotlib.figure import Figure

from vllm_mtp.tools.report_svg import PAGE_COLOURS, as_svg


def figure(title: str = "title", colour: str = "C0", tick: str = "a tick") -> Figure:
    drawn = Figure(figsize=(4, 3))
    axes = drawn.subplots()
    axes.plot([1, 2], [3, 4], color=colour, marker="o", label=title)
    axes.set_yticks([3, 4], labels=[tick, "b"])
    axes.grid()
    axes.legend()
    return drawn


def test_colours_are_those_of_the_page_and_others_stay() -> None:
    svg = as_svg(figure, "one", "caption")
    assert svg is not None
    assert "var(--c0)" in svg
    assert "currentColor" in svg
    assert not set(PAGE_COLOURS) & set(re.findall("#[0-9a-f]{6}", svg))
    other = as_svg(lambda: figure(colour="#123456"), "one", "caption")
    assert other is not None
    assert "#123456" in other


def test_ids_are_different_and_every_reference_finds_its_own() -> None:
    for prefix in ("one", "two"):
        svg = as_svg(figure, prefix, "caption")
        assert svg is not None
        ids = re.findall(r'\sid="([^"]+)"', svg)
        assert ids
        assert len(ids) == len(set(ids))
        assert all(each.startswith(f"{prefix}-") for each in ids)
        used = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', svg)
        assert used
        assert {a or b for a, b in used} <= set(ids)


def test_the_same_figure_is_the_same_text_whatever_the_user_has_set() -> None:
    first = as_svg(figure, "one", "caption")
    with matplotlib.rc_context({"axes.facecolor": "pink", "font.size": 30}):
        assert as_svg(figure, "one", "caption") == first


def test_nothing_of_a_name_is_markup_or_mathematics() -> None:
    hostile = "--><script>alert(1)</script> $\\frac{1}$ 名前"
    svg = as_svg(lambda: figure(hostile, tick=hostile), "one", "caption")
    assert svg is not None
    assert "script" not in svg
    assert "<!--" not in svg
    assert "alert" not in svg


@pytest.mark.parametrize("where", ["title", "tick"])
def test_a_name_without_end_leaves_room_for_the_figure(where: str) -> None:
    endless = as_svg(lambda: figure(**{where: "x" * 5000}), "one", "caption")
    assert endless is not None
    ((_, num_letters),) = Counter(re.findall('href="#([^"]+)"', endless)).most_common(1)
    assert 39 <= num_letters <= 100


def test_where_there_is_nothing_to_draw_there_is_no_picture() -> None:
    assert as_svg(lambda: None, "one", "caption") is None
