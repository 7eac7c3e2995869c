"""docs/architecture.md has a line about every module, and about none that has gone."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "tools": ROOT / "vllm_mtp" / "tools",
    "benchmarks": ROOT / "benchmarks",
}
"""By the names on that page; modules of subfolders are told by their folder."""


def listed() -> set[str]:
    """What the tables' first columns name: `a/b.py`, `c.py` is a/b.py and a/c.py."""
    names: set[str] = set()
    for line in (ROOT / "docs" / "architecture.md").read_text().splitlines():
        if not line.startswith("| `"):
            continue
        folder = ""
        for name in re.findall(r"`([^`]+)`", line.split("|")[1]):
            if "/" in name:
                folder = name.rpartition("/")[0] + "/"
            names.add(name if "/" in name else folder + name)
    return names


def modules(part: str) -> set[str]:
    paths = FOLDERS[part].glob("*.py")
    return {f"{part}/{path.name}" for path in paths if path.name != "__init__.py"}


@pytest.mark.parametrize("part", FOLDERS)
def test_every_module_has_a_line(part: str) -> None:
    assert modules(part) - listed() == set()


@pytest.mark.parametrize("part", FOLDERS)
def test_every_line_has_a_module(part: str) -> None:
    named = {name for name in listed() if re.fullmatch(rf"{part}/\w+\.py", name)}
    assert named - modules(part) == set()


def test_every_folder_of_the_benchmarks_has_a_line() -> None:
    folders = {
        f"benchmarks/{path.parent.name}/"
        for path in (ROOT / "benchmarks").glob("*/__init__.py")
    }
    assert folders - listed() == set()
