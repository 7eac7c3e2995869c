"""``vllm-mtp report``: see report.py in tools/."""

from pathlib import Path
from typing import Annotated

import typer

from vllm_mtp.cli.errors import errors_to_exit_codes

ResultsArgument = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="RESULT...",
        help="JSON that eval, compare, plan, doctor --json, verify or vocab build "
        "wrote.",
        show_default=False,
    ),
]
OutputOption = Annotated[
    Path | None, typer.Option(help="File to write (Markdown). Unset: print it.")
]


def report(results: ResultsArgument = None, output: OutputOption = None) -> None:
    """Show results as Markdown: what their commands print, and where they come from.

    Exit code 0: shown. 2: a file is no result, or the report cannot be written.
    """
    with errors_to_exit_codes(interrupted="interrupted; nothing was written"):
        from vllm_mtp.tools.report import make_report, write_report

        paths = results or []
        text = make_report(paths)
        if output is None:
            typer.echo(text)
            return
        write_report(text, output, paths)
        typer.echo(f"Written: {output}")
