"""``vllm-mtp vocab``: see vocab_build.py in tools/."""

from pathlib import Path
from typing import Annotated

import typer

from vllm_mtp.cli.arguments import ENGINES_INTERRUPTED, ModelOption
from vllm_mtp.cli.errors import errors_to_exit_codes

app = typer.Typer(
    name="vocab",
    help="Draft vocabularies: which tokens the MTP layers may propose.",
    no_args_is_help=True,
)


@app.command()
def build(
    output: Annotated[Path, typer.Argument(help="List to write (JSON).")],
    model: ModelOption,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text like what will be served; may be repeated. Of a .jsonl the "
            "field `text` of each line."
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts (.jsonl with `text` or `messages`): the target answers them, "
            "and its answers are counted. Fits served text better."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="Of the answers.")] = 1.0,
    dtype: Annotated[str, typer.Option(help="Of the engine that answers.")] = "auto",
    size: Annotated[
        int | None,
        typer.Option(
            help="Rows of the draft head, rounded up to a multiple of 128. Unset: a "
            "quarter of the vocabulary, at most 16384."
        ),
    ] = None,
    coverage: Annotated[
        float | None,
        typer.Option(help="Instead of --size: the share that shall be covered."),
    ] = None,
) -> None:
    """Count tokens and write those that are worth a row of the draft head.

    Serve with it: --speculative-config '{"method":"mtp_plus","draft_vocab":"FILE"}'.
    """
    from vllm_mtp.tools.server_process import ServerError

    with errors_to_exit_codes(ServerError, interrupted=ENGINES_INTERRUPTED):
        from rich.console import Console

        from vllm_mtp.tools.vocab_build import VocabOptions, build_vocabulary

        options = VocabOptions(
            output=output,
            model=model,
            texts=tuple(text or ()),
            prompts=prompts,
            max_tokens=max_tokens,
            temperature=temperature,
            dtype=dtype,
            size=size,
            coverage=coverage,
        )
        build_vocabulary(options, Console())
