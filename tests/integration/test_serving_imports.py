"""A server that has our plugin needs none of the packages of the commands.

vLLM, torch and transformers import some of them by themselves (jinja2, rich, scipy), so
``sys.modules`` tells nothing: what counts is which module asks for an import.
"""

import subprocess
import sys

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
for name in names:
    importlib.import_module(name)
print(*sorted(found))
parts = ("vllm_mtp.tools", "vllm_mtp.cli", "examples", "benchmarks", "tests")
print(*sorted(name for name in sys.modules if name.startswith(parts)))
exec("import rich.table", {"__name__": "vllm_mtp.example", "__builtins__": builtins})
print(*found)
"""


def test_serving_imports_no_tools_and_no_commands() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *TOOLS, "jinja2", "matplotlib", "ray"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    tools, commands, seen = done.stdout.splitlines()[-3:]
    assert tools == ""
    assert commands == ""
    assert seen == "vllm_mtp.example imports rich.table", "the watch sees one"
