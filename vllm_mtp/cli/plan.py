"""``vllm-mtp plan``: see plan.py in tools/."""

from pathlib import Path
from typing import Annotated

import typer

from vllm_mtp.cli.errors import errors_to_exit_codes


def plan(
    acceptance: Annotated[
        str | None,
        typer.Option(
            help="Conditional acceptance of each draft position, comma-separated; the "
            "last one repeats. One number: the same everywhere. Or a file of "
            "`vllm-mtp eval`. Unset: the probe's, or 0.8."
        ),
    ] = None,
    max_draft_length: Annotated[int, typer.Option(help="Largest K.")] = 8,
    probe: Annotated[
        Path | None,
        typer.Option(help="Measured: what `vllm-mtp doctor --probe --json` printed."),
    ] = None,
    hardware: Annotated[
        str, typer.Option(help="h100, h200, b200 or a JSON file (README).")
    ] = "h100",
    model: Annotated[
        str, typer.Option(help="dense-7b, dense-70b, moe-671b or a JSON file (README).")
    ] = "dense-7b",
    num_gpus: Annotated[int, typer.Option(help="That share the model.")] = 1,
    fp8: Annotated[bool, typer.Option(help="Weights in 8 bits.")] = False,
    batch: Annotated[
        str, typer.Option(help="Requests at a time, comma-separated.")
    ] = "1,4,16,64,256",
    context: Annotated[int, typer.Option(help="Tokens of every request.")] = 2048,
    demand: Annotated[
        float | None,
        typer.Option(
            help="Output tokens per second of all users: plan the cheapest fleet, its "
            "replicas, their GPUs, batch and K, instead of --num-gpus, --batch and "
            "--context."
        ),
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens, of a fleet.")] = 1024,
    answer: Annotated[int, typer.Option(help="Tokens, of a fleet.")] = 512,
    max_tpot_ms: Annotated[
        float | None, typer.Option(help="Longest time per output token, of a fleet.")
    ] = None,
    gpu_hour_price: Annotated[
        float | None, typer.Option(help="Also say what a million tokens cost.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Also write this JSON.")] = None,
) -> None:
    """Compute which draft length pays, and up to which batch; or plan a fleet."""
    with errors_to_exit_codes(interrupted="interrupted; nothing was written"):
        from rich.console import Console

        from vllm_mtp.config import ConfigError
        from vllm_mtp.tools.option_checks import parse_list, refuse
        from vllm_mtp.tools.plan import PlanOptions
        from vllm_mtp.tools.plan_fleet import FleetOptions
        from vllm_mtp.tools.plan_inputs import (
            read_acceptance,
            read_hardware,
            read_model,
            read_probe,
        )
        from vllm_mtp.tools.plan_report import run_plan, run_plan_fleet

        if output is not None and not output.parent.is_dir():
            refuse("output", str(output), "a file in a folder that exists")
        probed = probe and read_probe(probe)
        if acceptance is not None:
            accepts = read_acceptance(acceptance)
        else:
            accepts = probed.acceptance if probed else PlanOptions.acceptance
        options = PlanOptions(
            acceptance=accepts,
            max_draft_length=max_draft_length,
            probe=probed.steps if probed else (),
            hardware=read_hardware(hardware),
            model=read_model(model),
            num_gpus=num_gpus,
            is_fp8=fp8,
            batches=parse_list("batch", batch, int),
            context_tokens=context,
        )
        if demand is None:
            if max_tpot_ms is not None or gpu_hour_price is not None:
                raise ConfigError(
                    "demand: name the tokens per second of the fleet that max-tpot-ms "
                    "and gpu-hour-price are for"
                )
            run_plan(options, output, Console())
            return
        fleet = FleetOptions(
            options, demand, prompt, answer, max_tpot_ms, gpu_hour_price
        )
        run_plan_fleet(fleet, output, Console())
