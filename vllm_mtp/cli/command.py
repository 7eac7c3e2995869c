"""A command of Typer, made of a dataclass of options."""

import inspect
import json
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any

import typer

from vllm_mtp.cli.arguments import ENGINES_INTERRUPTED, parse_object
from vllm_mtp.cli.errors import errors_to_exit_codes
from vllm_mtp.tools.option_checks import parse_list
from vllm_mtp.tools.options import Options, option_name
from vllm_mtp.tools.server_process import ServerError


def command_of(
    kind: type[Options],
    run: Callable[[Any, Any], Any],
    name: str,
    interrupted: str = ENGINES_INTERRUPTED,
    *failures: type[Exception],
) -> Callable[..., None]:
    """A command of Typer with an option for each field."""
    hints = typing.get_type_hints(kind)

    def command(**chosen: Any) -> None:
        with errors_to_exit_codes(ServerError, *failures, interrupted=interrupted):
            values = {
                each.name: _parsed(each, hints[each.name], chosen[each.name])
                for each in fields(kind)
            }
            from rich.console import Console

            run(kind(**values), Console())

    parameters = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_shown(each),
            annotation=Annotated[_shown_type(hints[each.name]), _place(each)],
        )
        for each in fields(kind)
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    paragraphs = (kind.__doc__ or "").split("\n\n")
    command.__doc__ = "\n\n".join(" ".join(each.split()) for each in paragraphs)
    command.__name__ = name
    return command


def _place(each: Field[Any]) -> Any:
    """On the command line."""
    help = each.metadata["help"]
    if each.metadata["argument"]:
        return typer.Argument(help=help)
    name = option_name(each)
    is_flag = isinstance(each.default, bool)
    return typer.Option(f"--{name}/--no-{name}" if is_flag else f"--{name}", help=help)


def _item_type(hint: Any) -> Any:
    """Of the items of a tuple, which may be unset; None of anything else."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = typing.get_args(hint)[0]
    is_tuple = typing.get_origin(hint) is tuple
    return typing.get_args(hint)[0] if is_tuple else None


def _is_object(hint: Any) -> bool:
    return typing.get_origin(hint) is dict


def _shown_type(hint: Any) -> Any:
    if _item_type(hint):
        return str if typing.get_origin(hint) is tuple else str | None
    return str if _is_object(hint) else hint


def _shown(each: Field[Any]) -> Any:
    """The default as the command shows it."""
    if each.default_factory is not MISSING:
        return json.dumps(each.default_factory())
    if each.default is MISSING:
        return inspect.Parameter.empty
    if isinstance(each.default, tuple):
        return ",".join(map(str, each.default))
    return each.default


def _parsed(each: Field[Any], hint: Any, value: Any) -> Any:
    item = _item_type(hint)
    if _is_object(hint):
        return parse_object(option_name(each), value)
    if item is None:
        return value
    if value is None:
        return None
    return parse_list(option_name(each), value, item) if value else ()
