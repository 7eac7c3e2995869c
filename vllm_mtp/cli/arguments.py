"""Options that several subcommands have."""

import json
from typing import Annotated, Any

import typer

from vllm_mtp.config import ConfigError
from vllm_mtp.tools.options import MODEL_HELP

ModelArgument = Annotated[str, typer.Argument(help=MODEL_HELP)]

ENGINES_INTERRUPTED = "interrupted; the engines are stopped, nothing was written"


def parse_object(field: str, text: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ConfigError: It is none.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{field}: {text!r} is not allowed; must be a JSON object")
    return value


def names(text: str) -> tuple[str, ...]:
    """What stands between the commas of an option."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
