"""``python -m benchmarks report``: as ``vllm-mtp report``, of benchmarks, too."""

from pathlib import Path
from typing import Annotated

import typer

from vllm_mtp.cli.errors import errors_to_exit_codes


def report(
    results: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RESULT...",
            help="JSON that a benchmark or a command of vllm-mtp wrote.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="Page to write (HTML).")] = Path(
        "report.html"
    ),
) -> None:
    """Make one page of results: pictures, tables and where they come from.

    Exit code 0: written. 2: a file is no result, or the page cannot be written.
    """
    with errors_to_exit_codes(interrupted="interrupted; nothing was written"):
        # matplotlib takes a second to import.
        from benchmarks.report import KINDS
        from vllm_mtp.tools.report import run_report

        typer.echo(f"Written: {run_report(results or [], output, KINDS)}")
