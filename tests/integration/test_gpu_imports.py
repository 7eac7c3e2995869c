"""What a GPU worker imports leaves ``torch.cuda`` alone.

vLLM's CPU worker replaces ``torch.Event``, ``torch.cuda.Stream`` and others by
placeholders when it is imported, for the whole process.
"""

import subprocess
import sys

SCRIPT = """
import importlib, pkgutil, sys
import vllm_mtp.integration as package

for module in pkgutil.iter_modules(package.__path__):
    if module.name != "cpu_worker":
        importlib.import_module(f"{package.__name__}.{module.name}")
print(*(name for name in sys.modules if name.startswith("vllm.v1.worker.cpu")))
"""


def test_none_of_our_modules_but_the_cpu_worker_imports_vllms():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == ""
