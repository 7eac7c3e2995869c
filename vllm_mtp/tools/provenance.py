"""Under what conditions a figure was measured, and how it is written to a file."""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("vllm-mtp", "vllm", "torch", "transformers")


def collect_provenance(command: Sequence[str]) -> dict[str, Any]:
    """Facts that another person needs to repeat or to doubt a figure.

    Returns:
        A dictionary that JSON can hold.
    """
    return {
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        # Where the program lies on this machine helps nobody.
        "command": [Path(command[0]).name, *command[1:]],
        "git": git_state(Path(__file__).parent),
        "versions": {"python": platform.python_version()}
        | {name: _installed_version(name) for name in PACKAGES},
        "hardware": {
            "cpu": _cpu_name(),
            "num_cores": len(os.sched_getaffinity(0)),
            "gpus": gpu_names(),
            "load_average_1min": round(os.getloadavg()[0], 2),
        },
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the code that runs; None outside a git checkout.

    Returns:
        `commit` (None before the first one) and whether files differ from it.
    """
    status = _output("git", "-C", str(folder), "status", "--porcelain")
    if status is None:
        return None
    commit = _output("git", "-C", str(folder), "rev-parse", "--verify", "-q", "HEAD")
    return {"commit": commit, "is_dirty": bool(status)}


def gpu_names() -> list[str]:
    """GPUs that the NVIDIA driver lists; empty without one."""
    listing = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return listing.splitlines() if listing else []


def describe_hardware(hardware: dict[str, Any]) -> str:
    """The machine in a few words, for titles.

    Returns:
        Its GPUs, or cores and processor where there is none.
    """
    gpus: list[str] = hardware["gpus"]
    if gpus:
        return ", ".join(
            name if gpus.count(name) == 1 else f"{gpus.count(name)}x {name}"
            for name in dict.fromkeys(gpus)
        )
    return f"{hardware['num_cores']}x {hardware['cpu']}"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a result whole or not at all.

    Raises:
        OSError: The folder is missing or cannot be written to.
    """
    with replacing(path) as pending, pending.open("w") as file:
        json.dump(content, file, indent=1)
        file.write("\n")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write that takes the place of another when the block succeeds.

    Yields:
        An empty file beside it.

    Raises:
        OSError: The folder is missing or cannot be written to.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(descriptor)
    pending = Path(name)
    try:
        yield pending
        pending.chmod(0o644)  # temporary files are private, results are not
        pending.replace(path)
    finally:
        pending.unlink(missing_ok=True)


def _installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if sys.platform == "linux" and cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
