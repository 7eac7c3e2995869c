"""``python -m benchmarks rollback | steps | grid``: servers, engines and kernels."""

from pathlib import Path
from typing import Annotated

import typer

from examples.tiny_model import TINY_MODEL
from vllm_mtp.cli.errors import errors_to_exit_codes

DtypeOption = Annotated[
    str,
    typer.Option(
        help="float32, bfloat16 or float16. Greedy texts of all contenders must agree "
        "in float32; in the others near-ties may flip."
    ),
]
"""Weights and arithmetic of a benchmark."""

INTERRUPTED = "interrupted; nothing was written"
GRID_INTERRUPTED = (
    "interrupted; the engines are stopped and what was measured is kept: the same "
    "command continues"
)


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


def grid(
    workload: Annotated[
        str,
        typer.Option(
            help="Comma-separated, of: code (in-domain), prose (out-of-domain), "
            "constrained (prose, the output limited to half of the vocabulary, on "
            "Model Runner V2 to 1024 tokens of it: nearly no draft of vLLM's is "
            "accepted), "
            "phases (code and constrained by turns)."
        ),
    ] = "code,prose,constrained,phases",
    concurrency: Annotated[
        str, typer.Option(help="Requests at a time, comma-separated.")
    ] = "1,4,16,32",
    temperature: Annotated[
        str, typer.Option(help="Of sampling, comma-separated; 0 is greedy.")
    ] = "0,1",
    context: Annotated[
        str,
        typer.Option(
            help="Comma-separated, of: short (65 tokens), long (see --long-context)."
        ),
    ] = "short,long",
    draft_lengths: Annotated[
        str,
        typer.Option(help="K of vLLM's own mtp, comma-separated; a contender each."),
    ] = "1,2,3,4,5,6,7,8",
    repeats: Annotated[
        int, typer.Option(help="Timed rounds of each contender in each cell, at least.")
    ] = 3,
    max_repeats: Annotated[
        int,
        typer.Option(
            help="So many while what was measured is too close to a limit to tell on "
            "which side of it the cell lies."
        ),
    ] = 9,
    round_seconds: Annotated[
        float,
        typer.Option(
            help="Decode time of a round without speculation. All contenders generate "
            "as many tokens as that takes, at least 40 for each request."
        ),
    ] = 1.2,
    settle_seconds: Annotated[
        float,
        typer.Option(
            help="How long mtp_plus serves each cell before its rounds are timed, as "
            "on a server that has been up for a while."
        ),
    ] = 20.0,
    whole_requests: Annotated[
        bool,
        typer.Option(
            "--whole-requests",
            help="Compare whole requests, prompts included, too: their lengths differ, "
            "and prefix caches are emptied before each timed round, but for the "
            "context of long cells. Takes longer.",
        ),
    ] = False,
    model: Annotated[
        str,
        typer.Option(
            help="Folder with a checkpoint, or a hub name. Unset: the tiny one, which "
            "is so small that vLLM's own overhead is most of a step; see "
            "python -m examples.tiny_model expand."
        ),
    ] = str(TINY_MODEL),
    dtype: DtypeOption = "float32",
    long_context: Annotated[
        int, typer.Option(help="Tokens before the prompt in long cells.")
    ] = 1024,
    kv_cache_mib: Annotated[
        int, typer.Option(help="KV cache of each engine; there is one per contender.")
    ] = 320,
    output: Annotated[
        Path,
        typer.Option(
            help="Folder for grid-<hardware>.json, three pictures, and a .jsonl with "
            "every measurement, from which an interrupted run continues, "
            "also with other workloads, temperatures or more repeats."
        ),
    ] = Path(),
    report_only: Annotated[
        Path | None,
        typer.Option(
            help="Measure nothing: make tables and pictures from this .jsonl."
        ),
    ] = None,
) -> None:
    """Compare mtp_plus with no speculation and with every fixed draft length.

    Each contender is an engine in a process of its own, and they take turns within
    each repeat, two at a time if there are two cores. The cells of the grid are all
    combinations of workload, concurrency, temperature and context. Ctrl-C stops
    everything; the same command then continues where it was.
    """
    from vllm_mtp.tools.server_process import ServerError

    with errors_to_exit_codes(ServerError, interrupted=GRID_INTERRUPTED):
        from rich.console import Console

        from benchmarks.grid.bench import report_only as report
        from benchmarks.grid.bench import run_grid_bench
        from benchmarks.grid.options import GridOptions
        from vllm_mtp.tools.option_checks import parse_list

        if report_only is not None:
            report(report_only, Console())
            return
        options = GridOptions(
            workloads=parse_list("workload", workload, str),
            concurrencies=parse_list("concurrency", concurrency, int),
            temperatures=parse_list("temperature", temperature, float),
            contexts=parse_list("context", context, str),
            draft_lengths=parse_list("draft-lengths", draft_lengths, int),
            num_repeats=repeats,
            max_repeats=max_repeats,
            round_seconds=round_seconds,
            settle_seconds=settle_seconds,
            whole_requests=whole_requests,
            model=model,
            dtype=dtype,
            long_context_tokens=long_context,
            kv_cache_mib=kv_cache_mib,
            output=output,
        )
        run_grid_bench(options, Console())
