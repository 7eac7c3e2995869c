"""`vllm-mtp demo`: see lab/demo.py."""

from pathlib import Path
from typing import Annotated

import typer

from vllm_mtp.config import DEFAULT_DRAFT_LENGTH, MAX_DRAFT_LENGTH, ConfigError

INTERRUPTED_EXIT_CODE = 130


def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Folder with a checkpoint, or a hub name.  [bundled model]"),
    ] = None,
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
    ] = DEFAULT_DRAFT_LENGTH,
    dtype: Annotated[
        str, typer.Option(help="Of the servers; texts can only agree in float32.")
    ] = "float32",
    start_timeout_s: Annotated[
        float, typer.Option(min=1, help="How long the servers may take to start.")
    ] = 600.0,
    json: Annotated[
        Path | None, typer.Option(help="Also write the result to this file.")
    ] = None,
) -> None:
    """Show mtp_plus, vLLM's own mtp and no speculation side by side."""
    # Here, so that other subcommands do not wait for the clients to be imported.
    from rich.console import Console

    from vllm_mtp.lab.demo import run_demo
    from vllm_mtp.lab.demo_plan import DemoOptions
    from vllm_mtp.lab.demo_servers import ServerError

    errors = Console(stderr=True)
    try:
        options = DemoOptions(
            model=model,
            methods=tuple(methods.split(",")),
            num_prompts=prompts,
            max_tokens=tokens,
            num_repeats=repeats,
            baseline_draft_tokens=draft_tokens,
            dtype=dtype,
            start_timeout_s=start_timeout_s,
        )
        result = run_demo(options, json, Console())
    except ConfigError as error:
        errors.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except ServerError as error:
        errors.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        errors.print("interrupted; the servers are stopped")
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None
    if result.differences:
        raise typer.Exit(1)
