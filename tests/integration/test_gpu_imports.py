"""What a GPU worker imports leaves ``torch.cuda`` alone.

vLLM's CPU worker replaces ``torch.Event``, ``torch.cuda.Stream`` and others by
placeholders when it is imported, for the whole process.
"""

import subprocess
import sys

SCRIPT = """
import importlib, pkgutil, sys
import vllm_mtp.integration as package

prefix = f"{package.__name__}."
names = [module.name for module in pkgutil.walk_packages(package.__path__, prefix)]
names.remove(f"{prefix}cpu.worker")
for name in names:
    importlib.import_module(name)
assert f"{prefix}v2.speculator" in names
print(*(name for name in sys.modules if name.startswith("vllm.v1.worker.cpu")))
"""


def test_none_of_our_modules_but_the_cpu_worker_imports_vllms():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == ""
