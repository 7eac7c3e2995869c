"""``vllm-mtp soak``: see soak.py in tools/."""

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


def soak(
    model: ModelArgument,
    minutes: Annotated[float, typer.Option(help="How long clients go on.")] = 30.0,
    clients: Annotated[int, typer.Option(help="Requests at a time.")] = 8,
    speculative_config: Annotated[
        str, typer.Option(help="Of the server (JSON), as for `vllm serve`.")
    ] = '{"method": "mtp_plus"}',
    without: Annotated[
        str, typer.Option(help="Options of requests to leave out, with commas between.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Of the requests.")] = 0,
    output: Annotated[
        Path | None, typer.Option(help="Also write a report (JSON).")
    ] = None,
) -> None:
    """Keep a server busy with every kind of request; it must end as it began.

    Exit code 0: it holds nothing, has not grown, and its counters agree. 1: it does
    not, or it died. 2: wrong input.
    """
    from vllm_mtp.tools.server_process import ServerError

    with errors_to_exit_codes(ServerError, interrupted=ENGINES_INTERRUPTED):
        from rich.console import Console

        from vllm_mtp.tools.soak import SoakOptions, run_soak

        options = SoakOptions(
            model=model,
            speculative_config=parse_object("speculative-config", speculative_config),
            minutes=minutes,
            num_clients=clients,
            seed=seed,
            skipped=names(without),
            output=output,
        )
        report = run_soak(options, Console())
    if not report["is_sound"]:
        raise typer.Exit(FAILED_EXIT_CODE)
