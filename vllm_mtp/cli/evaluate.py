"""``vllm-mtp eval``: see eval.py in tools/."""

from pathlib import Path
from typing import Annotated

import typer

from vllm_mtp.cli.arguments import parse_object
from vllm_mtp.cli.errors import errors_to_exit_codes
from vllm_mtp.config import ConfigError
from vllm_mtp.request_options import AUTO

INTERRUPTED = (
    "interrupted; finished prompts are kept, and the same command goes on with the rest"
)


def evaluate(
    output: Annotated[Path, typer.Argument(help="Evaluation to write (JSON).")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder with a checkpoint, or a hub name; of a server, which of its "
            "models."
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            help="Ask a running server instead, for example http://localhost:8000/v1 "
            "(its key: OPENAI_API_KEY)."
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A .jsonl with text or messages, id and category; or a folder with a "
            "data set of Hugging Face. Unset: what the checkpoint brings, or 96 "
            "built-in ones in 8 categories."
        ),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(help="At most. Unset: all.")
    ] = None,
    k: Annotated[
        str,
        typer.Option(help="Draft length of every request, or auto: the controller's."),
    ] = "3",
    temperature: Annotated[float, typer.Option(help="Of sampling.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="Of every answer.")] = 256,
    concurrency: Annotated[int, typer.Option(help="Requests at a time.")] = 8,
    dtype: Annotated[str, typer.Option(help="Of an engine of our own.")] = "auto",
    max_model_len: Annotated[int, typer.Option(help="Of an engine of our own.")] = 2048,
    speculative_config: Annotated[
        str, typer.Option(help="Of an engine of our own (JSON).")
    ] = '{"method": "mtp_plus", "draft_vocab": "full"}',
) -> None:
    """Measure acceptance prompt by prompt, to be compared by `vllm-mtp compare`."""
    from vllm_mtp.tools.server_process import ServerError

    with errors_to_exit_codes(ServerError, interrupted=INTERRUPTED):
        from rich.console import Console

        from vllm_mtp.tools.eval import EvalOptions, run_eval

        options = EvalOptions(
            output=output,
            model=model,
            server=server,
            prompts=prompts,
            num_prompts=num_prompts,
            draft_length=_parse_k(k),
            temperature=temperature,
            max_tokens=max_tokens,
            concurrency=concurrency,
            dtype=dtype,
            max_model_len=max_model_len,
            speculative_config=parse_object("speculative-config", speculative_config),
        )
        run_eval(options, Console())


def _parse_k(text: str) -> int | None:
    if text == AUTO:
        return None
    try:
        return int(text)
    except ValueError:
        allowed = f"{AUTO!r} or a whole number"
        raise ConfigError(f"k: {text!r} is not allowed; must be {allowed}") from None
