"""``python -m benchmarks report``: as ``vllm-mtp report``, of benchmarks, too."""

import typer

from vllm_mtp.cli.errors import errors_to_exit_codes
from vllm_mtp.cli.report import OutputOption, ResultsArgument


def report(results: ResultsArgument = None, output: OutputOption = None) -> None:
    """Show results of benchmarks and of vllm-mtp's commands as Markdown.

    Exit code 0: shown. 2: a file is no result, or the report cannot be written.
    """
    with errors_to_exit_codes(interrupted="interrupted; nothing was written"):
        # matplotlib takes a second to import.
        from benchmarks.report import KINDS
        from vllm_mtp.tools.report import make_report, write_report

        paths = results or []
        text = make_report(paths, KINDS)
        if output is None:
            typer.echo(text)
            return
        write_report(text, output, paths)
        typer.echo(f"Written: {output}")
