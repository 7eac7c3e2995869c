"""`vllm-mtp demo`: see tools/demo.py."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_mtp.cli.arguments import ModelArgument
from vllm_mtp.cli.errors import errors_to_exit_codes
from vllm_mtp.config import DEFAULT_FIXED_DRAFT_LENGTH, MAX_DRAFT_LENGTH, ConfigError

if TYPE_CHECKING:
    from vllm_mtp.tools.demo_plan import DemoOptions

INTERRUPTED = "interrupted; the servers are stopped"


def demo(
    model: ModelArgument,
    methods: Annotated[
        str, typer.Option(help="Comma-separated; `none` must be among them.")
    ] = "none,mtp,mtp_plus",
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 6,
    tokens: Annotated[
        int, typer.Option(min=2, max=512, help="Tokens generated for each prompt.")
    ] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Timed passes.")] = 3,
    draft_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_DRAFT_LENGTH,
            help="Draft length of vLLM's own mtp; mtp_plus chooses for itself.",
        ),
    ] = DEFAULT_FIXED_DRAFT_LENGTH,
    dtype: Annotated[
        str,
        typer.Option(help="Of the servers. Only in float32 texts are sure to agree."),
    ] = "float32",
    start_timeout_s: Annotated[
        float, typer.Option(min=1, help="How long the servers may take to start.")
    ] = 600.0,
    serve_args: Annotated[
        str,
        typer.Option(help="More for every `vllm serve`: '--trust-remote-code'."),
    ] = "",
    json: Annotated[
        Path | None, typer.Option(help="Also write the result to this file.")
    ] = None,
) -> None:
    """Show mtp_plus, vLLM's own mtp and no speculation side by side."""
    # Here, so that other subcommands do not wait for the clients to be imported.
    from vllm_mtp.tools.demo_plan import DemoOptions
    from vllm_mtp.tools.demo_servers import ServerError

    with errors_to_exit_codes(ServerError, interrupted=INTERRUPTED):
        options = DemoOptions(
            model=model,
            methods=tuple(name.strip() for name in methods.split(",")),
            num_prompts=prompts,
            max_tokens=tokens,
            num_repeats=repeats,
            baseline_draft_tokens=draft_tokens,
            dtype=dtype,
            start_timeout_s=start_timeout_s,
            serve_args=_split(serve_args),
        )
        _run(options, json)


def _split(serve_args: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(serve_args))
    except ValueError as error:
        raise ConfigError(f"serve-args: {serve_args!r}: {error}") from None


def _run(options: "DemoOptions", json: Path | None) -> None:
    from rich.console import Console

    from vllm_mtp.tools.demo import is_exact, run_demo

    result = run_demo(options, json, Console())
    if result.differences and is_exact(options):
        raise typer.Exit(1)
