"""Who may import whom, read from the syntax tree so that no import can hide.

Imports inside functions count: they make cycles as well as the others.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_mtp.cli.program import TOOLS

PACKAGE = Path(__file__).parents[2] / "vllm_mtp"
BENCHMARKS = PACKAGE.with_name("benchmarks")
EXAMPLES = PACKAGE.with_name("examples")

NOT_IN_THE_WHEEL = {"benchmarks", "examples", "tests", "configs"}
"""A clone has them, an installation has not. Benchmarks may import vllm and us."""

LAYERS = (
    {"records"},
    {"config", "acceptance"},
    {"draft_lengths"},
    {"split_options"},
    {
        "control",
        "drafting",
        "verification",
        "kernels",
        "metrics",
        "page",
        "request_options",
        "tune",
    },
    {"integration"},
    {"tools"},
    {"cli"},
)
"""From the bottom up: a module imports its own part or a layer below."""

EXTRAS = {*TOOLS, "jinja2", "matplotlib", "ray"}
"""Serving does without; `tests/integration/test_serving_imports.py` sees it run."""

FORBIDDEN_THIRD_PARTY = {
    "records": {"vllm", "torch", "pydantic", *EXTRAS},
    "config": {"vllm", "torch", *EXTRAS},
    "draft_lengths": {"vllm", "torch", *EXTRAS},
    "split_options": {"vllm", "torch", *EXTRAS},
    "acceptance": {"vllm", "torch", *EXTRAS},
    "request_options": {"vllm", "torch", *EXTRAS},
    "control": {"vllm", "torch", *EXTRAS},
    "drafting": {"vllm", *EXTRAS},
    "verification": {"vllm", *EXTRAS},
    "kernels": {"vllm", *EXTRAS},
    "metrics": {"vllm", "torch", *EXTRAS},
    "page": {"vllm", "torch", *EXTRAS},
    # Its pictures alone need matplotlib.
    "tune": {"vllm", *(EXTRAS - {"matplotlib"})},
    "integration": EXTRAS,
    "tools": {"vllm", "matplotlib", "jinja2"},
    "cli": {"vllm", "torch", "matplotlib", "jinja2"},
}

OTHER_RUNNER = {"v1": "v2", "v2": "v1"}
"""Rooms of `integration/`: the two runners never import each other."""


def part_of(module: str) -> str:
    """``vllm_mtp.control.fixed`` -> ``control``."""
    return module.split(".")[1] if "." in module else ""


def room_of(module: str) -> str:
    """``vllm_mtp.integration.v1.drafter`` -> ``v1``; "" outside `integration/`."""
    names = module.split(".")
    return names[2] if part_of(module) == "integration" and len(names) > 3 else ""


def layer_of(part: str) -> int:
    return next(i for i, parts in enumerate(LAYERS) if part in parts)


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Every module a file imports, those only for type checkers left out."""
    for node in _without_type_checking(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            assert node.module is not None
            if node.module.split(".")[0] == "vllm_mtp":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module


def _without_type_checking(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        guard = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not guard:
            yield node
            yield from _without_type_checking(node)


def violations(module: str, source: str) -> list[str]:
    """What a file imports although it must not."""
    part = part_of(module)
    found = []
    for name in imported_modules(ast.parse(source)):
        root = name.split(".")[0]
        if root in FORBIDDEN_THIRD_PARTY.get(part, set()) | NOT_IN_THE_WHEEL:
            found.append(f"{module} imports {name}")
        if root != "vllm_mtp" or part_of(name) in ("", "__version__"):
            continue
        other = part_of(name)
        if other != part and layer_of(other) >= layer_of(part):
            found.append(f"{module} imports {name}, which is not below it")
        if room_of(name) and room_of(name) == OTHER_RUNNER.get(room_of(module)):
            found.append(f"{module} imports {name}, the other runner's")
    return found


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def clone_files() -> list[Path]:
    return sorted([*BENCHMARKS.rglob("*.py"), *EXAMPLES.rglob("*.py")])


def module_name(path: Path) -> str:
    relative = path.relative_to(PACKAGE.parent).with_suffix("")
    return ".".join(relative.parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", package_files(), ids=module_name)
def test_imports_point_downwards(path: Path) -> None:
    assert violations(module_name(path), path.read_text()) == []


@pytest.mark.parametrize("path", clone_files(), ids=module_name)
def test_benchmarks_and_examples_need_no_tests(path: Path) -> None:
    roots = {
        name.split(".")[0] for name in imported_modules(ast.parse(path.read_text()))
    }
    assert not roots & {"tests", "configs"}


@pytest.mark.parametrize(
    "path",
    [
        *package_files(),
        *clone_files(),
        *sorted(Path(__file__).parents[1].rglob("*.py")),
    ],
    ids=str,
)
def test_every_module_that_is_imported_exists(path: Path) -> None:
    """Also where an engine or a GPU would be needed to find out."""
    root = PACKAGE.parent
    for name in imported_modules(ast.parse(path.read_text())):
        parts = name.split(".")
        if parts[0] not in ("vllm_mtp", "benchmarks", "examples") or len(parts) < 3:
            continue
        # Of `from a.b import c` either a.b is a module or a.b.c is.
        module, inner = root.joinpath(*parts[:-1]), root.joinpath(*parts)
        found = (module.with_suffix(".py"), inner.with_suffix(".py"))
        packages = (module / "__init__.py", inner / "__init__.py")
        holds = packages[0].is_file() and f"{parts[-1]}" in packages[0].read_text()
        assert any(map(Path.is_file, (*found, packages[1]))) or holds, name


def test_every_part_of_the_package_has_a_layer() -> None:
    parts = {part_of(module_name(path)) for path in package_files()} - {""}
    assert parts <= set().union(*LAYERS)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("vllm_mtp.control.x", "import torch"),
        ("vllm_mtp.control.x", "def f():\n    from vllm.config import VllmConfig"),
        ("vllm_mtp.control.x", "from vllm_mtp.integration.load import compat"),
        ("vllm_mtp.control.x", "from vllm_mtp import kernels"),
        ("vllm_mtp.records", "from vllm_mtp.config import METHOD"),
        ("vllm_mtp.tools.x", "from examples.tiny_model import model"),
        ("vllm_mtp.integration.x", "def f():\n    import scipy.stats"),
        ("vllm_mtp.integration.x", "from vllm_mtp.tools import eval"),
        ("vllm_mtp.metrics.x", "from rich.table import Table"),
        (
            "vllm_mtp.integration.v1.drafter",
            "from vllm_mtp.integration.v2.speculator import MTPPlusSpeculator",
        ),
        ("vllm_mtp.cli.x", "import vllm.config"),
        ("vllm_mtp.tools.x", "def f():\n    from benchmarks.grid import cells"),
        ("vllm_mtp.cli.x", "import benchmarks"),
        ("vllm_mtp.integration.x", "from tests.support import engines"),
    ],
)
def test_the_rule_sees_a_forbidden_import(module: str, source: str) -> None:
    assert violations(module, source)


def test_the_entry_module_imports_nothing_outside_the_standard_library() -> None:
    """vLLM only logs an exception while importing it; the plugin would be missing."""
    tree = ast.parse((PACKAGE / "integration" / "load" / "plugin.py").read_text())
    names = {
        name.split(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in imported_modules(ast.Module(body=[node], type_ignores=[]))
    }
    assert names <= set(sys.stdlib_module_names)
