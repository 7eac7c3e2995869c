"""``vllm-mtp bench``: see lab/rollback_bench.py and lab/step_bench.py."""

from pathlib import Path
from typing import Annotated

import typer

from vllm_mtp.cli.errors import errors_to_exit_codes
from vllm_mtp.config import DEFAULT_DRAFT_LENGTH, MAX_DRAFT_LENGTH

INTERRUPTED = "interrupted; nothing was written"

app = typer.Typer(
    name="bench",
    help="Measure this machine: times, ratios and targets, with a picture.",
    no_args_is_help=True,
)


@app.command()
def rollback(
    device: Annotated[
        str, typer.Option(help="auto, cpu or cuda; auto takes a GPU if there is one.")
    ] = "auto",
    batches: Annotated[
        str, typer.Option(help="Requests of a step, comma-separated.")
    ] = "1,8,32,128,256,512",
    draft_lengths: Annotated[
        str, typer.Option(help="Draft lengths K, comma-separated.")
    ] = "1,3,4,5",
    layers: Annotated[
        str | None,
        typer.Option(
            help="Numbers of layers to scrub, comma-separated. Unset: 4,32 on a CPU, "
            "4,32,61 on a GPU."
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(help="Measurements of each contender in each case.")
    ] = 9,
    output: Annotated[
        Path, typer.Option(help="Folder for rollback-<hardware>.json and .png.")
    ] = Path(),
) -> None:
    """Time KV rollback beside vLLM's own chain and the copy bandwidth."""
    # Here, so that other subcommands do not wait for torch and vLLM.
    from vllm_mtp.lab.rollback_bench_timing import ContendersDifferError

    with errors_to_exit_codes(ContendersDifferError, interrupted=INTERRUPTED):
        from rich.console import Console

        from vllm_mtp.lab.rollback_bench_options import parse_options

        options = parse_options(
            device=device,
            batches=batches,
            draft_lengths=draft_lengths,
            layers=layers,
            num_repeats=repeats,
            output=output,
        )
        # vLLM takes seconds to import: bad options are refused before.
        from vllm_mtp.lab.rollback_bench import run_rollback_bench

        run_rollback_bench(options, Console())


@app.command()
def steps(
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder with a checkpoint, or a hub name. Unset: the bundled one."
        ),
    ] = None,
    contender: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=none or NAME={...}, a speculative config; at least two, the "
            "first is compared with. Unset: vLLM's mtp, mtp_plus, mtp_plus with scrub."
        ),
    ] = None,
    draft_tokens: Annotated[
        int,
        typer.Option(min=1, max=MAX_DRAFT_LENGTH, help="K of the unset contenders."),
    ] = DEFAULT_DRAFT_LENGTH,
    concurrency: Annotated[
        int, typer.Option(min=1, max=8, help="Requests at a time.")
    ] = 1,
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 12,
    tokens: Annotated[
        int, typer.Option(min=2, max=512, help="Tokens generated for each prompt.")
    ] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 9,
    dtype: Annotated[str, typer.Option(help="Of the servers.")] = "float32",
    output: Annotated[
        Path, typer.Option(help="Folder for steps-<hardware>.json and .png.")
    ] = Path(),
) -> None:
    """Compare the step time of whole servers, side by side."""
    from vllm_mtp.lab.demo_servers import ServerError

    with errors_to_exit_codes(ServerError, interrupted=INTERRUPTED):
        from rich.console import Console

        from vllm_mtp.lab.step_bench import (
            StepBenchOptions,
            default_contenders,
            parse_contender,
            run_step_bench,
        )

        contenders = tuple(parse_contender(text) for text in contender or ())
        options = StepBenchOptions(
            contenders or default_contenders(draft_tokens),
            model=model,
            concurrency=concurrency,
            num_prompts=prompts,
            max_tokens=tokens,
            num_repeats=repeats,
            dtype=dtype,
        )
        run_step_bench(options, output, Console())
