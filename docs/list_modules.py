"""Brings the list of modules in architecture.md up to date.

A test compares, too. A module's line is the first of its docstring.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("architecture.md")
FOLDERS = ("vllm_mtp", "benchmarks", "examples")
HEADER = "| module | in one line |\n| --- | --- |\n"


def modules() -> Iterator[Path]:
    """Python files, packages by their ``__init__`` only where that says something."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name != "__init__.py":
                yield path


def line_of(path: Path) -> str:
    """The row of one module.

    Raises:
        ValueError: It has no docstring.
    """
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    if not docstring:
        raise ValueError(f"{path.relative_to(ROOT)} has no docstring")
    name = str(path.relative_to(ROOT)).removeprefix("vllm_mtp/")
    return f"| `{name}` | {docstring.splitlines()[0].rstrip('.')} |\n"


def updated(page: str) -> str:
    """The page with the rows that belong into its last table."""
    kept, _, _ = page.partition(HEADER)
    return kept + HEADER + "".join(map(line_of, modules()))


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
