"""``vllm-mtp plan``: see plan.py in lab/."""

from pathlib import Path
from typing import Annotated

import typer

from vllm_mtp.cli.errors import errors_to_exit_codes


def plan(
    acceptance: Annotated[
        str,
        typer.Option(
            help="Conditional acceptance of each draft position, comma-separated; the "
            "last one repeats. One number: the same everywhere."
        ),
    ] = "0.8",
    max_draft_length: Annotated[int, typer.Option(help="Largest K.")] = 8,
    draft_cost: Annotated[
        float | None,
        typer.Option(
            help="Measured: one draft step, in steps without speculation. Unset: the "
            "machine and model below."
        ),
    ] = None,
    verify_cost: Annotated[
        float, typer.Option(help="Measured: one more row to verify, in the same unit.")
    ] = 0.0,
    hardware: Annotated[str, typer.Option(help="h100, h200 or b200.")] = "h100",
    model: Annotated[
        str, typer.Option(help="dense-7b, dense-70b or moe-671b.")
    ] = "dense-7b",
    num_gpus: Annotated[int, typer.Option(help="That share the model.")] = 1,
    fp8: Annotated[bool, typer.Option(help="Weights in 8 bits.")] = False,
    batch: Annotated[
        str, typer.Option(help="Requests at a time, comma-separated.")
    ] = "1,4,16,64,256",
    context: Annotated[int, typer.Option(help="Tokens of every request.")] = 2048,
    output: Annotated[
        Path | None, typer.Option(help="Also write this JSON, and a .png beside it.")
    ] = None,
) -> None:
    """Compute which draft length pays, and up to which batch."""
    with errors_to_exit_codes(interrupted="interrupted; nothing was written"):
        from rich.console import Console

        from vllm_mtp.lab.grid_options import parse_list, refuse
        from vllm_mtp.lab.plan import PlanOptions
        from vllm_mtp.lab.plan_report import run_plan

        if output is not None and not output.parent.is_dir():
            refuse("output", str(output), "a file in a folder that exists")
        options = PlanOptions(
            acceptance=parse_list("acceptance", acceptance, float),
            max_draft_length=max_draft_length,
            draft_cost=draft_cost,
            verify_cost=verify_cost,
            hardware=hardware,
            model=model,
            num_gpus=num_gpus,
            is_fp8=fp8,
            batches=parse_list("batch", batch, int),
            context_tokens=context,
        )
        run_plan(options, output, Console())
