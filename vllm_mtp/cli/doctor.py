"""``vllm-mtp doctor``: see doctor.py in tools/."""

import json
import os
from typing import Annotated

import typer

from vllm_mtp.cli.arguments import ModelArgument
from vllm_mtp.cli.errors import FAILED_EXIT_CODE, errors_to_exit_codes


def doctor(
    model: ModelArgument,
    draft_model: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint that has the MTP layers (speculative_config.model); "
            "unset: the model's own."
        ),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option(
            help="Also start an engine: measure acceptance and costs on a few prompts "
            "and predict the best K and its speedup."
        ),
    ] = False,
    dtype: Annotated[str, typer.Option(help="Of the probe's engine.")] = "auto",
    concurrency: Annotated[
        int, typer.Option(min=1, max=64, help="Requests at a time in the probe.")
    ] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a report (JSON) instead of lines.")
    ] = False,
) -> None:
    """Look for what stands in the way of serving a model with its MTP layers.

    Exit code 0: nothing. 1: a problem was found. 2: wrong input.
    """
    # What vLLM says on the way is not the report.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    from vllm_mtp.tools.server_process import ServerError

    with errors_to_exit_codes(ServerError, interrupted="interrupted"):
        from rich.console import Console

        from vllm_mtp.tools.doctor import ProbeOptions, run_doctor

        probing = ProbeOptions(dtype, concurrency) if probe else None
        console = None if as_json else Console()
        report = run_doctor(model, probing, console, draft_model)
        if as_json:
            typer.echo(json.dumps(report, indent=2))
    if not report["is_healthy"]:
        raise typer.Exit(FAILED_EXIT_CODE)
