"""``python -m benchmarks NAME`` for a few engines that are played side by side."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli import DtypeOption
from benchmarks.options import ModelOption
from examples.tiny_model import TINY_MODEL
from vllm_mtp.cli.arguments import ENGINES_INTERRUPTED
from vllm_mtp.cli.errors import errors_to_exit_codes
from vllm_mtp.config import DEFAULT_FIXED_DRAFT_LENGTH


def crossing(
    model: ModelOption = str(TINY_MODEL),
    draft_length: Annotated[
        int, typer.Option(help="K of vLLM's own mtp, with the table and without.")
    ] = DEFAULT_FIXED_DRAFT_LENGTH,
    threshold: Annotated[
        int, typer.Option(help="Largest batch for which vLLM's table drafts.")
    ] = 4,
    request_tokens: Annotated[
        int, typer.Option(help="Tokens of the shortest of the eight requests.")
    ] = 12,
    waves: Annotated[int, typer.Option(help="Times that a round fills up.")] = 2,
    repeats: Annotated[int, typer.Option(help="Timed rounds of each contender.")] = 5,
    output: Annotated[
        Path, typer.Option(help="Folder for crossing-<hardware>.json.")
    ] = Path(),
) -> None:
    """Let the batch cross the threshold of vLLM's batch-size table (vllm#49548)."""
    from vllm_mtp.tools.server_process import ServerError

    with errors_to_exit_codes(ServerError, interrupted=ENGINES_INTERRUPTED):
        from rich.console import Console

        from benchmarks.crossing import CrossingOptions, run_crossing_bench

        options = CrossingOptions(
            model=model,
            draft_length=draft_length,
            threshold=threshold,
            request_tokens=request_tokens,
            num_waves=waves,
            num_repeats=repeats,
            output=output,
        )
        run_crossing_bench(options, Console())


def off(
    model: ModelOption = str(TINY_MODEL),
    concurrency: Annotated[
        str, typer.Option(help="Requests at a time, comma-separated.")
    ] = "1,16",
    request_tokens: Annotated[int, typer.Option(help="Tokens of every request.")] = 128,
    temperature: Annotated[float, typer.Option(help="Of sampling; 0 is greedy.")] = 0.0,
    dtype: DtypeOption = "float32",
    repeats: Annotated[int, typer.Option(help="Timed rounds of each engine.")] = 7,
    output: Annotated[Path, typer.Option(help="Folder for off-<hardware>.json.")] = (
        Path()
    ),
) -> None:
    """Compare mtp_plus with K pinned to 0 with an engine without speculation."""
    from vllm_mtp.tools.server_process import ServerError

    with errors_to_exit_codes(ServerError, interrupted=ENGINES_INTERRUPTED):
        from rich.console import Console

        from benchmarks.off import OffOptions, run_off_bench
        from vllm_mtp.tools.option_checks import parse_list

        options = OffOptions(
            model=model,
            concurrencies=parse_list("concurrency", concurrency, int),
            request_tokens=request_tokens,
            temperature=temperature,
            dtype=dtype,
            num_repeats=repeats,
            output=output,
        )
        run_off_bench(options, Console())


def host(
    model: ModelOption = str(TINY_MODEL),
    draft_length: Annotated[
        int, typer.Option(help="K of vLLM's own mtp, and the bound of mtp_plus.")
    ] = 5,
    concurrency: Annotated[
        str, typer.Option(help="Requests at a time, comma-separated.")
    ] = "1,32",
    request_tokens: Annotated[int, typer.Option(help="Tokens of every request.")] = 256,
    dtype: DtypeOption = "float32",
    repeats: Annotated[int, typer.Option(help="Timed rounds of each engine.")] = 5,
    output: Annotated[Path, typer.Option(help="Folder for host-<hardware>.json.")] = (
        Path()
    ),
) -> None:
    """Measure the CPU time by which scheduling may keep a fast GPU waiting."""
    from vllm_mtp.tools.server_process import ServerError

    with errors_to_exit_codes(ServerError, interrupted=ENGINES_INTERRUPTED):
        from rich.console import Console

        from benchmarks.host import HostOptions, run_host_bench
        from vllm_mtp.tools.option_checks import parse_list

        options = HostOptions(
            model=model,
            draft_length=draft_length,
            concurrencies=parse_list("concurrency", concurrency, int),
            request_tokens=request_tokens,
            dtype=dtype,
            num_repeats=repeats,
            output=output,
        )
        run_host_bench(options, Console())


def drafting(
    model: ModelOption = str(TINY_MODEL),
    draft_length: Annotated[int, typer.Option(help="K of every contender.")] = (
        DEFAULT_FIXED_DRAFT_LENGTH
    ),
    concurrency: Annotated[
        str, typer.Option(help="Requests at a time, comma-separated.")
    ] = "1,8",
    temperature: Annotated[float, typer.Option(help="Of sampling; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Of sampling.")] = 1.0,
    request_tokens: Annotated[int, typer.Option(help="Tokens of every request.")] = 64,
    warm_ups: Annotated[
        int, typer.Option(help="Untimed rounds, in which the vocabulary is learnt.")
    ] = 6,
    repeats: Annotated[int, typer.Option(help="Timed rounds of each contender.")] = 5,
    turn_seconds: Annotated[
        float,
        typer.Option(
            help="How long a contender works before the next one's turn. Of a model of "
            "a few megabytes, which the caches hold, longer turns are fairer."
        ),
    ] = 0.2,
    dtype: DtypeOption = "float32",
    draft_vocab: Annotated[
        Path | None, typer.Option(help="A list, for one more contender.")
    ] = None,
    ablations: Annotated[
        bool,
        typer.Option(
            help="Also mtp_plus with the whole vocabulary, with unrounded weights, and "
            "with a target's head that is not prefiltered."
        ),
    ] = True,
    compiled: Annotated[
        bool,
        typer.Option(
            help="Let vLLM compile on a CPU, too, as a server does: minutes to start."
        ),
    ] = False,
    label: Annotated[str, typer.Option(help="Part of the result's name.")] = "",
    output: Annotated[
        Path, typer.Option(help="Folder for drafting-<label>-<hardware>.json.")
    ] = Path(),
) -> None:
    """Compare drafts: whole and small vocabulary, greedy and drawn, all at one K."""
    from vllm_mtp.tools.server_process import ServerError

    with errors_to_exit_codes(ServerError, interrupted=ENGINES_INTERRUPTED):
        from rich.console import Console

        from benchmarks.drafting import DraftingOptions, run_drafting_bench
        from vllm_mtp.tools.option_checks import parse_list

        options = DraftingOptions(
            model=model,
            draft_length=draft_length,
            concurrencies=parse_list("concurrency", concurrency, int),
            temperature=temperature,
            top_p=top_p,
            request_tokens=request_tokens,
            num_warm_ups=warm_ups,
            num_repeats=repeats,
            turn_seconds=turn_seconds,
            dtype=dtype,
            draft_vocab=draft_vocab,
            ablations=ablations,
            compiled=compiled,
            label=label,
            output=output,
        )
        run_drafting_bench(options, Console())


def vocabulary(
    model: ModelOption = str(TINY_MODEL),
    draft_length: Annotated[int, typer.Option(help="K of every contender.")] = 3,
    concurrency: Annotated[int, typer.Option(help="Requests of a round.")] = 16,
    request_tokens: Annotated[int, typer.Option(help="Tokens of every request.")] = 192,
    learning_tokens: Annotated[
        int, typer.Option(help="Committed before anything is compared.")
    ] = 20_000,
    rounds: Annotated[int, typer.Option(help="Compared rounds of each domain.")] = 4,
    rows: Annotated[
        int | None,
        typer.Option(help="Of list and auto. Unset: the default for the vocabulary."),
    ] = None,
    output: Annotated[
        Path, typer.Option(help="Folder for vocabulary-<hardware>.json and .png.")
    ] = Path(),
) -> None:
    """Compare the vocabulary that a server learns with a list and with all tokens.

    Acceptance length on Python, then on prose that nobody has announced.
    """
    from vllm_mtp.tools.server_process import ServerError

    with errors_to_exit_codes(ServerError, interrupted=ENGINES_INTERRUPTED):
        from rich.console import Console

        from benchmarks.vocabulary import VocabularyBenchOptions, run_vocabulary_bench

        options = VocabularyBenchOptions(
            model=model,
            draft_length=draft_length,
            concurrency=concurrency,
            request_tokens=request_tokens,
            learning_tokens=learning_tokens,
            num_rounds=rounds,
            rows=rows,
            output=output,
        )
        run_vocabulary_bench(options, Console())
