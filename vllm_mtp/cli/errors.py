"""What a subcommand says when something goes wrong: a sentence, not a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from vllm_mtp.config import ConfigError

FAILED_EXIT_CODE = 1
WRONG_INPUT_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130


@contextmanager
def errors_to_exit_codes(
    *failures: type[Exception], interrupted: str
) -> Iterator[None]:
    """End with a sentence and an exit code for what is not a bug."""
    try:
        yield
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(WRONG_INPUT_EXIT_CODE) from None
    except failures as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(FAILED_EXIT_CODE) from None
    except KeyboardInterrupt:
        typer.echo(interrupted, err=True)
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None
