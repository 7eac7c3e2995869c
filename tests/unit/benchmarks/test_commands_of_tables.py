"""docs/benchmarking.md names what reproduces each table: all results, real commands."""

import re
from pathlib import Path

import typer.main

from benchmarks.__main__ import app

DOCS = Path(__file__).parents[3] / "docs"
LISTED = (DOCS / "benchmarking.md").read_text().partition("## What reproduces")[2]


def test_every_folder_of_results_is_in_the_list() -> None:
    folders = {path.name for path in (DOCS / "results").iterdir() if path.is_dir()}
    named = set(re.findall(r"`results/([\w-]+)`", LISTED))
    assert folders <= named
    assert named - folders <= {"copying"}, "no results there yet"


def test_every_benchmark_of_the_list_is_a_command() -> None:
    named = set(re.findall(r"python -m benchmarks ([\w-]+)", LISTED))
    assert named
    assert named <= typer.main.get_command(app).commands.keys()  # type: ignore[attr-defined]
