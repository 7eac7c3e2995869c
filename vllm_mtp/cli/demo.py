"""``vllm-mtp demo``: see demo.py in tools/."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from vllm_mtp.cli.arguments import ModelArgument
from vllm_mtp.cli.errors import FAILED_EXIT_CODE, errors_to_exit_codes
from vllm_mtp.config import DEFAULT_FIXED_DRAFT_LENGTH, ConfigError

INTERRUPTED = "interrupted; the servers are stopped"


def demo(
    model: ModelArgument,
    prompts: Annotated[int, typer.Option(help="Number of prompts.")] = 16,
    tokens: Annotated[int, typer.Option(help="Generated for each prompt.")] = 64,
    concurrency: Annotated[int, typer.Option(help="Requests at a time.")] = 1,
    draft_tokens: Annotated[
        int, typer.Option(help="K of vLLM's own mtp; mtp_plus chooses for itself.")
    ] = DEFAULT_FIXED_DRAFT_LENGTH,
    dtype: Annotated[
        str,
        typer.Option(help="Of the servers. Only in float32 texts are sure to agree."),
    ] = "float32",
    start_timeout_s: Annotated[
        float, typer.Option(help="How long a server may take to start.")
    ] = 600.0,
    serve_args: Annotated[
        str,
        typer.Option(help="More for every `vllm serve`: '--trust-remote-code'."),
    ] = "",
    output: Annotated[
        Path | None, typer.Option(help="Also write the result (JSON).")
    ] = None,
) -> None:
    """Show mtp_plus, vLLM's own mtp and no speculation side by side.

    Exit code 1: texts differ in float32, or a server failed. 2: wrong input.
    """
    from vllm_mtp.tools.server_process import ServerError

    with errors_to_exit_codes(ServerError, interrupted=INTERRUPTED):
        from rich.console import Console

        from vllm_mtp.tools.demo import EXACT_DTYPE, DemoOptions, run_demo

        options = DemoOptions(
            model=model,
            num_prompts=prompts,
            max_tokens=tokens,
            concurrency=concurrency,
            draft_tokens=draft_tokens,
            dtype=dtype,
            start_timeout_s=start_timeout_s,
            serve_args=_split(serve_args),
            output=output,
        )
        result = run_demo(options, Console())
    if dtype == EXACT_DTYPE and not result["is_exact"]:
        raise typer.Exit(FAILED_EXIT_CODE)


def _split(serve_args: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(serve_args))
    except ValueError as error:
        raise ConfigError(f"serve-args: {serve_args!r}: {error}") from None
