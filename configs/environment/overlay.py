"""Builds the clone layer: this clone's editable install over the shared layer.

Why a layer and not `pip install -e` into the shared environment: there is one
`vllm_mtp` in an environment, so the last clone to install would run in all of them.
The layer takes seconds: a bare virtual environment, one `.pth` line that continues
the search path into the shared packages, the shared commands started with this
interpreter (else `vllm` would not see this clone's plugin), and the editable install.
"""

import shutil
import sys
from pathlib import Path

from layout import MARKER, Layout, beside, source_digest
from runner import Steps, exclusive


def is_complete(layout: Layout) -> bool:
    """Whether the layer is there and was made from the present sources."""
    expected = _stamp_text(layout)
    return layout.python.exists() and all(
        stamp.is_file() and stamp.read_text() == expected
        for stamp in (layout.clone / MARKER, _own_stamp(layout))
    )


def ensure_overlay(layout: Layout) -> None:
    """Build the clone layer unless it is there and up to date.

    Args:
        layout: Where; its shared layer must be complete.

    Raises:
        SetupError: A step failed.
    """
    if is_complete(layout):
        return
    with exclusive(beside(layout.clone, "lock")):
        if not is_complete(layout):
            _build(layout)


def _own_stamp(layout: Layout) -> Path:
    """Stamp inside the clone (git ignores build/), next to the one in the cache.

    A fresh clone at the path of a deleted one has neither its native libraries nor
    its metadata, whatever the cache says.
    """
    return layout.repo / "build" / "environment.txt"


def _stamp_text(layout: Layout) -> str:
    return f"{layout.shared.name} {source_digest(layout.repo)}\n"


def _build(layout: Layout) -> None:
    text = _stamp_text(layout)
    marker, own_stamp = layout.clone / MARKER, _own_stamp(layout)
    log = beside(layout.clone, "log")
    log.write_text("")
    steps = Steps(2, log)
    steps.announce(f"environment of this clone, {layout.clone}")
    # A finished layer only lacks the new install: processes may be running in it.
    if not (layout.python.exists() and marker.is_file()):
        shutil.rmtree(layout.clone, ignore_errors=True)
        steps.run([sys.executable, "-m", "venv", "--without-pip", layout.clone])
        _chain(layout)
        link_commands(layout.shared / "bin", layout.clone / "bin")
    own_stamp.unlink(missing_ok=True)
    steps.announce("vllm-mtp, editable")
    options = ["-q", "--no-input", "--disable-pip-version-check"]
    options += ["--no-deps", "--no-build-isolation"]
    steps.run([layout.python, "-m", "pip", "install", *options, "-e", layout.repo])
    own_stamp.parent.mkdir(exist_ok=True)
    own_stamp.write_text(text)
    marker.write_text(text)


def _chain(layout: Layout) -> None:
    """Continue the layer's search path into the shared packages.

    `addsitedir` instead of a plain path, so that `.pth` files there count as well.
    """
    shared, own = (
        next((folder / "lib").glob("python*/site-packages"))
        for folder in (layout.shared, layout.clone)
    )
    line = f"import site; site.addsitedir({str(shared)!r})\n"
    (own / "_vllm_mtp_shared.pth").write_text(line)


def link_commands(source: Path, target: Path) -> None:
    """Offer the commands of one environment in another.

    Args:
        source: `bin` folder whose commands are offered.
        target: `bin` folder whose interpreter runs those written in Python; a name
            that it has already is kept.
    """
    for command in sorted(source.iterdir()):
        offered = target / command.name
        if offered.exists() or not command.is_file() or command.suffix:
            continue
        script = _python_part(command.read_bytes())
        if script is None:
            offered.symlink_to(command)
            continue
        # pip's own form for long paths: the kernel cuts a `#!` line at 127 bytes.
        header = f"#!/bin/sh\n'''exec' \"{target / 'python'}\" \"$0\" \"$@\"\n' '''\n"
        offered.write_bytes(header.encode() + script)
        offered.chmod(0o755)


def _python_part(content: bytes) -> bytes | None:
    """What follows the header of a Python script; None for any other file."""
    lines = content.split(b"\n", 3)
    if lines[0].startswith(b"#!") and b"python" in lines[0]:
        return content.split(b"\n", 1)[1]
    if lines[0] == b"#!/bin/sh" and len(lines) == 4 and lines[1][:7] == b"'''exec":
        return lines[3]
    return None
