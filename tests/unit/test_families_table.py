"""The README says of each model family whether a test runs it, and of no other."""

import re
from pathlib import Path

import pytest

from tests.support.families import FAMILIES, NOT_RUN

ROOT = Path(__file__).parents[2]
RUN, NOT_RUN_STATE, EXPECTED = "run", "weights and config tested, not run", "expected"
WANTED = {RUN: FAMILIES, NOT_RUN_STATE: NOT_RUN, EXPECTED: {}}

ROW = re.compile(r"\| (.+) \| (?:\*\*)?([a-z ,]+?)(?:\*\*)?(?:: (.+))? \|")
TEST = re.compile(r"`(tests/\S+\.py)::(\w+)`")


def rows() -> list[tuple[str, str, str | None]]:
    """Families, their state and what is said of it."""
    text = (ROOT / "README.md").read_text()
    table = text.partition("| model family | state |\n| --- | --- |\n")[2]
    lines = table.partition("\n\n")[0].splitlines()
    found = [ROW.fullmatch(line) for line in lines]
    assert all(found), lines
    return [match.groups() for match in found if match]


def test_the_table_has_the_three_states() -> None:
    assert {state for _, state, _ in rows()} == {*WANTED}


@pytest.mark.parametrize("state", WANTED)
def test_each_family_has_the_state_that_tests_give_it(state: str) -> None:
    cells = [families for families, each, _ in rows() if each == state]
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(WANTED[state])


def test_the_tests_exist_and_take_the_families_that_they_are_named_for() -> None:
    for families, state, text in rows():
        match = TEST.fullmatch(text or "")
        if state == EXPECTED:
            assert match is None
            continue
        assert match is not None, state
        source = (ROOT / match[1]).read_text()
        assert f"\ndef {match[2]}(" in source
        if "`" in families:  # by id
            known = {RUN: r"\w*FAMILIES", NOT_RUN_STATE: "NOT_RUN"}[state]
            assert re.search(rf"tests.support.families import .*\b{known}\b", source)
