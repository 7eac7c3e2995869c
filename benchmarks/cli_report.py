"""``python -m benchmarks report``: as ``vllm-mtp report``, of benchmarks, too."""

from vllm_mtp.cli.errors import errors_to_exit_codes
from vllm_mtp.cli.report import OutputOption, ResultsArgument, show


def report(results: ResultsArgument = None, output: OutputOption = None) -> None:
    """Show results of benchmarks and of vllm-mtp's commands as Markdown.

    Exit code 0: shown. 2: a file is no result, or the report cannot be written.
    """
    with errors_to_exit_codes(interrupted="interrupted; nothing was written"):
        # matplotlib takes a second to import.
        from benchmarks.report import KINDS

        show(results or [], output, KINDS)
