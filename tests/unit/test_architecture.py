"""docs/architecture.md has one line for each module, and CONTRIBUTING's files exist."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def list_modules() -> object:
    spec = importlib.util.spec_from_file_location("m", DOCS / "list_modules.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_module_has_its_line() -> None:
    page = (DOCS / "architecture.md").read_text()
    assert page == list_modules().updated(page), "run `python docs/list_modules.py`"  # type: ignore[attr-defined]


def test_integration_has_no_file_at_its_top() -> None:
    top = (ROOT / "vllm_mtp" / "integration").glob("*.py")
    assert [path.name for path in top] == ["__init__.py"]


def mentioned(page: Path) -> set[str]:
    """Files of this repository that a page names, in backticks."""
    return set(
        re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|md|yml|json|toml))`", page.read_text())
    )


@pytest.mark.parametrize(
    "page",
    [
        "CONTRIBUTING.md",
        "README.md",
        *map(str, sorted(p.relative_to(ROOT) for p in DOCS.glob("*.md"))),
    ],
)
def test_files_that_pages_name_exist(page: str) -> None:
    for name in mentioned(ROOT / page):
        places = (ROOT, ROOT / "vllm_mtp", ROOT / "vllm_mtp" / "integration", DOCS)
        assert any((place / name).exists() for place in places), name


def test_a_newcomer_finds_the_file_for_twenty_changes() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    table = page.partition("## Where to change what")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 20
    assert all(re.search(r"`[\w./-]+/", row) or "csrc/" in row for row in rows)
