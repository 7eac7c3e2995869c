"""``python -m benchmarks rollback``: kernels."""

from pathlib import Path
from typing import Annotated

import typer

from vllm_mtp.cli.errors import errors_to_exit_codes

INTERRUPTED = "interrupted; nothing was written"


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
    from benchmarks.rollback.timing import ContendersDifferError

    with errors_to_exit_codes(ContendersDifferError, interrupted=INTERRUPTED):
        from rich.console import Console

        from benchmarks.rollback.options import parse_options

        options = parse_options(
            device=device,
            batches=batches,
            draft_lengths=draft_lengths,
            layers=layers,
            num_repeats=repeats,
            output=output,
        )
        # vLLM takes seconds to import: bad options are refused before.
        from benchmarks.rollback.bench import run_rollback_bench

        run_rollback_bench(options, Console())
