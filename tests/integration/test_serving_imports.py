"""What a server imports with our plugin, and what it must not.

It needs none of the packages of the commands. And on a GPU what it imports leaves
``torch.cuda`` alone: vLLM's CPU worker replaces ``torch.Event``, ``torch.cuda.Stream``
and others by placeholders when it is imported, for the whole process.

vLLM, torch and transformers import some of them by themselves (jinja2, rich, scipy), so
``sys.modules`` tells nothing: what counts is which module asks for an import.
"""

import subprocess
import sys
from typing import NamedTuple

import pytest

from vllm_mtp.cli.program import TOOLS

SCRIPT = """
import builtins, importlib, pkgutil, sys

found = set()
original = builtins.__import__


def watched(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {}).get("__name__", "")
    if importer.startswith("vllm_mtp") and name.partition(".")[0] in sys.argv[1:]:
        found.add(f"{importer} imports {name}")
    return original(name, globals, locals, fromlist, level)


builtins.__import__ = watched
import vllm_mtp.integration as package
from vllm_mtp.integration.load import plugin

plugin.register()
prefix = f"{package.__name__}."
names = [module.name for module in pkgutil.walk_packages(package.__path__, prefix)]
assert f"{prefix}v2.speculator" in names
cpu_worker = f"{prefix}cpu.worker"
names.remove(cpu_worker)
for name in names:
    importlib.import_module(name)
print(*(name for name in sys.modules if name.startswith("vllm.v1.worker.cpu")))
importlib.import_module(cpu_worker)
print(*(name for name in sys.modules if name.startswith("vllm.v1.worker.cpu")))
print(*sorted(found))
parts = ("vllm_mtp.tools", "vllm_mtp.cli", "examples", "benchmarks", "tests")
print(*sorted(name for name in sys.modules if name.startswith(parts)))
exec("import rich.table", {"__name__": "vllm_mtp.example", "__builtins__": builtins})
print(*found)
"""


class Imports(NamedTuple):
    """What a fresh process printed; each is a list with blanks between."""

    cpu_workers: str
    """Of vLLM, after all of our modules but our CPU worker."""
    cpu_workers_after_ours: str
    tools: str
    commands: str
    seen: str
    """What the watch sees of a module that asks for a package of the commands."""


@pytest.fixture(scope="module")
def imports() -> Imports:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *TOOLS, "jinja2", "matplotlib", "ray"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return Imports(*done.stdout.splitlines()[-5:])


def test_serving_imports_no_tools_and_no_commands(imports: Imports) -> None:
    assert imports.tools == ""
    assert imports.commands == ""
    assert imports.seen == "vllm_mtp.example imports rich.table", "the watch sees one"


def test_none_of_our_modules_but_the_cpu_worker_imports_vllms(imports: Imports) -> None:
    assert imports.cpu_workers == ""
    assert imports.cpu_workers_after_ours
