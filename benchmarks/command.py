"""Commands made of dataclasses: a field is an option, with its help and its limits."""

import inspect
import json
import typing
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.options import check_numbers
from vllm_mtp.cli.arguments import parse_object
from vllm_mtp.cli.errors import errors_to_exit_codes
from vllm_mtp.tools.option_checks import parse_list, refuse
from vllm_mtp.tools.server_process import ServerError

INTERRUPTED = "interrupted; the engines are stopped, nothing was written"


def option(default: Any, help: str, *limits: float, name: str = "") -> Any:
    """A field that is an option of the command.

    Args:
        default: Its value unless told otherwise. Of a tuple of numbers or names the
                command takes a list with commas between, of a dictionary JSON.
        help: What the user reads.
        *limits: The least and the greatest that are allowed.
        name: Of the option where it is not the field's.
    """
    metadata = {"help": help, "limits": limits, "name": name}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a benchmark's command takes; its limits are checked."""

    def __post_init__(self) -> None:
        """Check every option.

        Raises:
            ConfigError: One of them has a value that is not allowed.
        """
        for each in fields(self):
            _check(each, getattr(self, each.name))

    def as_json(self) -> dict[str, Any]:
        """For the result file."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}


def _plain(value: Any) -> Any:
    """As JSON has it; of a file its name, since folders are this machine's."""
    if isinstance(value, Path):
        return value.name
    return list(value) if isinstance(value, tuple) else value


def option_name(each: Field[Any]) -> str:
    """What the user calls a field."""
    return each.metadata["name"] or each.name.replace("_", "-")


def _check(each: Field[Any], value: Any) -> None:
    limits, name = each.metadata["limits"], option_name(each)
    if not limits or value is None:
        return
    if isinstance(value, tuple):
        check_numbers(name, value, limits)
    elif not limits[0] <= value <= limits[1]:  # refuses nan, too
        refuse(name, value, f"a number from {limits[0]:g} to {limits[1]:g}")


def command_of(
    kind: type[Options],
    run: Callable[[Any, Console], Any],
    name: str,
    interrupted: str = INTERRUPTED,
    *failures: type[Exception],
) -> Callable[..., None]:
    """A command of Typer with an option for each field."""
    types = typing.get_type_hints(kind)

    def command(**chosen: Any) -> None:
        with errors_to_exit_codes(ServerError, *failures, interrupted=interrupted):
            values = {
                each.name: _parsed(each, types[each.name], chosen[each.name])
                for each in fields(kind)
            }
            run(kind(**values), Console())

    parameters = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_shown(each),
            annotation=Annotated[
                _shown_type(types[each.name]),
                typer.Option(_flags(each), help=each.metadata["help"]),
            ],
        )
        for each in fields(kind)
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    command.__name__, command.__doc__ = name, kind.__doc__
    return command


def _flags(each: Field[Any]) -> str:
    name = option_name(each)
    return f"--{name}/--no-{name}" if isinstance(each.default, bool) else f"--{name}"


def _item_type(hint: Any) -> Any:
    """Of the items of a tuple; None of anything else."""
    is_tuple = typing.get_origin(hint) is tuple
    return typing.get_args(hint)[0] if is_tuple else None


def _is_object(hint: Any) -> bool:
    return typing.get_origin(hint) is dict


def _shown_type(hint: Any) -> Any:
    return str if _item_type(hint) or _is_object(hint) else hint


def _shown(each: Field[Any]) -> Any:
    """The default as the command shows it."""
    if each.default_factory is not MISSING:
        return json.dumps(each.default_factory())
    if isinstance(each.default, tuple):
        return ",".join(map(str, each.default))
    return each.default


def _parsed(each: Field[Any], hint: Any, value: Any) -> Any:
    item = _item_type(hint)
    if _is_object(hint):
        return parse_object(option_name(each), value)
    if item is None:
        return value
    return parse_list(option_name(each), value, item) if value else ()
