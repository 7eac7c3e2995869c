"""Each "yes" of the guide's table of configurations names tests, and those exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "gpu.md").read_text()

CLAIM = re.compile(r"(?:yes|always 3:)((?: [a-zA-Z])*)")
TEST = re.compile(r"`(tests/\S+\.py)::(\w+)`")


def rows(first_cells: str) -> list[list[str]]:
    """Cells of the lines of a table, by the pattern of their first one."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in GUIDE.splitlines()
        if re.match(rf"\| {first_cells} \|", line)
    ]


CLAIMS = [cell for _, *cells in rows(r"[^|-]{3,}") for cell in cells]
TESTS = {letter: test for letter, test in rows(r"[a-zA-Z]")}


def test_every_yes_is_backed_by_tests() -> None:
    backing = [CLAIM.fullmatch(cell) for cell in CLAIMS if cell.startswith(("y", "a"))]
    assert len(backing) > 25
    for each in backing:
        assert each is not None, CLAIMS
        assert each[1], "a yes without a test"
        assert set(each[1].split()) <= TESTS.keys()
    named = {letter for each in backing if each for letter in each[1].split()}
    assert len(named) == len(TESTS) - 1, "the last one is of a GPU"


def test_the_tests_exist() -> None:
    for test in TESTS.values():
        match = TEST.fullmatch(test)
        assert match is not None, test
        assert f"\ndef {match[2]}(" in (ROOT / match[1]).read_text(), test
