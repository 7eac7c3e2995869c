"""``vllm-mtp compare``: see compare.py in tools/."""

from pathlib import Path
from typing import Annotated

import typer

from vllm_mtp.cli.errors import FAILED_EXIT_CODE, errors_to_exit_codes


def compare(
    base: Annotated[Path, typer.Argument(help="Evaluation of what was before.")],
    new: Annotated[Path, typer.Argument(help="Evaluation of what is now.")],
    false_alarm_rate: Annotated[
        float,
        typer.Option(help="Of all figures together, between two equal runs."),
    ] = 0.005,
    length_floor: Annotated[
        float,
        typer.Option(help="Least acceptance length, as a share of the base's."),
    ] = 0.95,
    position_floor: Annotated[
        float, typer.Option(help="Least acceptance of each position, likewise.")
    ] = 0.95,
    markdown: Annotated[
        Path | None, typer.Option(help="Also write this, for a pull request.")
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(help="Also write this JUnit XML.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Also write this JSON.")] = None,
) -> None:
    """Say whether acceptance has become worse between two evaluations.

    Exit code 0: not worse. 1: worse. 2: files that cannot be compared.
    """
    with errors_to_exit_codes(interrupted="interrupted"):
        from rich.console import Console

        from vllm_mtp.tools.compare import CompareOptions
        from vllm_mtp.tools.compare_report import run_compare
        from vllm_mtp.tools.option_checks import refuse

        outputs = {"markdown": markdown, "junit": junit, "json": output}
        for option, path in outputs.items():
            if path is not None and not path.parent.is_dir():
                refuse(option, str(path), "a file in a folder that exists")
        options = CompareOptions(false_alarm_rate, length_floor, position_floor)
        comparison = run_compare((base, new), options, outputs, Console())
    if comparison.is_failure:
        raise typer.Exit(FAILED_EXIT_CODE)
