"""``vllm-mtp report``: see report.py in tools/."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_mtp.cli.errors import errors_to_exit_codes

if TYPE_CHECKING:
    from vllm_mtp.tools.report import Kind

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
        from vllm_mtp.tools.report import KINDS

        show(results or [], output, KINDS)


def show(results: list[Path], output: Path | None, kinds: "Mapping[str, Kind]") -> None:
    """Print or write a report of results of these kinds."""
    from vllm_mtp.tools.report import make_report, write_report

    text = make_report(results, kinds)
    if output is None:
        typer.echo(text.encode(errors="replace").decode())
        return
    write_report(text, output, results)
    typer.echo(f"Written: {output}")
