"""``vllm-mtp demo``: see demo.py in tools/."""

from typing import TYPE_CHECKING

import typer

from vllm_mtp.cli.errors import FAILED_EXIT_CODE
from vllm_mtp.tools.demo import EXACT_DTYPE, DemoOptions, run_demo

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = "interrupted; the servers are stopped"


def demo(options: DemoOptions, console: "Console") -> None:
    """Run it; the exit code says whether texts agree where they must."""
    result = run_demo(options, console)
    if options.dtype == EXACT_DTYPE and not result["is_exact"]:
        raise typer.Exit(FAILED_EXIT_CODE)
