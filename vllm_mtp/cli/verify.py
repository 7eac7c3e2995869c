"""``vllm-mtp verify``: see verify.py and fuzz_run.py in tools/."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from vllm_mtp.cli.errors import FAILED_EXIT_CODE
from vllm_mtp.tools.options import option
from vllm_mtp.tools.verify_options import VerifyOptions

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class VerifyCommand(VerifyOptions):
    """Show that a server with speculation answers as it would without.

    By chosen texts and samples; with `--requests N` by N random requests to engines
    that are disturbed in many ways.

    Exit code 0: shown. 1: not shown, or an engine failed. 2: wrong input.
    """

    num_requests: int | None = option(
        None,
        "Random requests over all options and kinds of input instead, each compared "
        "token by token.",
        name="requests",
    )
    seed: int = option(0, "Of the random requests.")
    without: tuple[str, ...] = option(
        (),
        "Kinds that random requests leave out: fields of SamplingParams, session, "
        "abort, priority, wrong; with commas between.",
    )
    engines: tuple[str, ...] = option(
        (), "Engines of --requests, with commas. Unset: all."
    )
    request: str | None = option(None, "Repeat this (JSON), as --requests printed it.")


def run_verify(chosen: VerifyCommand, console: "Console") -> None:
    """By random requests, or by chosen texts and samples."""
    if chosen.num_requests is not None or chosen.request is not None:
        is_exact = not _fuzz(chosen, console)["num_failures"]
    else:
        # Brings scipy.
        from vllm_mtp.tools.verify import run_verification

        is_exact = run_verification(chosen, console)["is_exact"]
    if not is_exact:
        raise typer.Exit(FAILED_EXIT_CODE)


def _fuzz(chosen: VerifyCommand, console: "Console") -> dict[str, int]:
    from vllm_mtp.tools.fuzz_run import FuzzOptions, run_fuzzer

    return run_fuzzer(
        FuzzOptions(
            model=chosen.model,
            num_requests=1 if chosen.num_requests is None else chosen.num_requests,
            seed=chosen.seed,
            without=chosen.without,
            axes=chosen.engines or None,
            request=chosen.request,
            speculative_config=chosen.speculative_config,
            engine_args=chosen.engine_args,
            output=chosen.output,
        ),
        console,
    )
