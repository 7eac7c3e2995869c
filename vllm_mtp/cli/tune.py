"""``vllm-mtp tune``: see tune.py in tools/."""

from typing import TYPE_CHECKING

import typer

from vllm_mtp.cli.errors import FAILED_EXIT_CODE
from vllm_mtp.tools.tune import TuneOptions, run_tune

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = "interrupted; the same command goes on where it was"


def tune(options: TuneOptions, console: "Console") -> None:
    """Exit code 1: it is not shown that the tuned head is better."""
    verdict = run_tune(options, console)
    if verdict is not None and not verdict.is_better:
        raise typer.Exit(FAILED_EXIT_CODE)
