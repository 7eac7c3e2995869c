"""``vllm-mtp verify``: see verify.py in tools/."""

from pathlib import Path
from typing import Annotated

import typer

from vllm_mtp.cli.arguments import (
    ENGINES_INTERRUPTED,
    ModelArgument,
    names,
    parse_object,
)
from vllm_mtp.cli.errors import FAILED_EXIT_CODE, errors_to_exit_codes


def verify(
    model: ModelArgument,
    speculative_config: Annotated[
        str, typer.Option(help="What is verified (JSON), as for `vllm serve`.")
    ] = '{"method": "mtp_plus"}',
    engine_args: Annotated[
        str,
        typer.Option(
            help="Further arguments of vLLM's EngineArgs (JSON), for example "
            '{"tensor_parallel_size": 2}.'
        ),
    ] = "{}",
    dtype: Annotated[
        str,
        typer.Option(
            help="float32 tells most; bfloat16 and float16 exchange near-ties."
        ),
    ] = "float32",
    prompts: Annotated[
        Path | None,
        typer.Option(help="Prompts (.jsonl with `text`). Unset: built-in ones."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Greedy texts.")] = 32,
    max_tokens: Annotated[int, typer.Option(help="Of each greedy text.")] = 96,
    samples: Annotated[int, typer.Option(help="Of each sampling setting.")] = 1000,
    sampled_tokens: Annotated[
        int, typer.Option(help="First tokens of a sample that are compared.")
    ] = 3,
    tie_tolerance: Annotated[
        float | None,
        typer.Option(
            help="Difference of log-probabilities that counts as a near-tie. Unset: "
            "0.001 for float32, 0.05 for float16, 0.3 for bfloat16."
        ),
    ] = None,
    false_alarm_rate: Annotated[
        float, typer.Option(help="How often a correct server may be refused.")
    ] = 1e-3,
    requests: Annotated[
        int | None,
        typer.Option(
            help="Random requests over all options and kinds of input instead, each "
            "compared token by token."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random requests.")] = 0,
    without: Annotated[
        str,
        typer.Option(
            help="Kinds that random requests leave out: fields of SamplingParams, "
            "session, abort, priority, wrong; with commas between."
        ),
    ] = "",
    engines: Annotated[
        str, typer.Option(help="Engines of --requests, with commas. Unset: all.")
    ] = "",
    request: Annotated[
        str | None,
        typer.Option(help="Repeat this (JSON), as --requests printed it."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Also write a report (JSON).")
    ] = None,
) -> None:
    """Show that a server with speculation answers as it would without.

    By chosen texts and samples; with `--requests N` by N random requests to engines
    that are disturbed in many ways.

    Exit code 0: shown. 1: not shown, or an engine failed. 2: wrong input.
    """
    from vllm_mtp.tools.server_process import ServerError

    with errors_to_exit_codes(ServerError, interrupted=ENGINES_INTERRUPTED):
        from rich.console import Console

        if requests is not None or request is not None:
            from vllm_mtp.tools.fuzz_run import FuzzOptions, run_fuzzer

            fuzzed = run_fuzzer(
                FuzzOptions(
                    model=model,
                    num_requests=1 if requests is None else requests,
                    seed=seed,
                    without=names(without),
                    axes=names(engines) or None,
                    request=request,
                    speculative_config=parse_object(
                        "speculative-config", speculative_config
                    ),
                    engine_args=parse_object("engine-args", engine_args),
                    output=output,
                ),
                Console(),
            )
            raise typer.Exit(FAILED_EXIT_CODE if fuzzed["num_failures"] else 0)

        from vllm_mtp.tools.verify import run_verification
        from vllm_mtp.tools.verify_options import VerifyOptions

        options = VerifyOptions(
            model=model,
            speculative_config=parse_object("speculative-config", speculative_config),
            prompts=prompts,
            num_prompts=num_prompts,
            max_tokens=max_tokens,
            num_samples=samples,
            sampled_tokens=sampled_tokens,
            dtype=dtype,
            tie_tolerance=tie_tolerance,
            false_alarm_rate=false_alarm_rate,
            engine_args=parse_object("engine-args", engine_args),
            output=output,
        )
        report = run_verification(options, Console())
    if not report["is_exact"]:
        raise typer.Exit(FAILED_EXIT_CODE)
