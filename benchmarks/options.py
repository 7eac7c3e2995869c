"""What the options and results of several benchmarks have in common."""

import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_mtp.tools.option_checks import refuse

DTYPES = ("float32", "bfloat16", "float16")
ModelOption = Annotated[
    str,
    typer.Option(help="Folder with a checkpoint, or a hub name. Unset: the tiny one."),
]
AGAIN = "none again"
"""A second engine without speculation: how far two equal ones differ is what a machine
can tell."""


def check_output_folder(output: Path) -> None:
    """Check that results can be written before they are measured.

    Raises:
        ConfigError: They cannot.
    """
    if not (output.is_dir() and os.access(output, os.W_OK)):
        refuse("output", str(output), "a folder that exists and is writable")


def hardware_slug(device_name: str) -> str:
    """A device's name as part of a file name: `nvidia-h200`."""
    plain = re.sub(r"\(\w+\)", "", device_name.lower())  # (R), (TM)
    return re.sub(r"[^a-z0-9.]+", "-", plain).strip("-.") or "unknown"


def machine_slug(hardware: dict[str, Any]) -> str:
    """The machine as part of a file name: its first GPU, or its processor."""
    return hardware_slug((hardware["gpus"] or [hardware["cpu"]])[0])
