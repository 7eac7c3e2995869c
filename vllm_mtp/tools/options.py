"""Options as dataclasses: a field has its help and its limits, and is checked by them.

`cli/command.py` makes a command of such a class.
"""

from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from vllm_mtp.tools.option_checks import Limits, refuse

MODEL_HELP = "Folder with a checkpoint, or a hub name."


def argument(help: str) -> Any:
    """A field that the command takes by its position."""
    return field(metadata={"help": help, "limits": (), "name": "", "argument": True})


def required(help: str) -> Any:
    """A field that is an option of the command, and must be given."""
    return field(metadata={"help": help, "limits": (), "name": "", "argument": False})


def option(default: Any, help: str, *limits: float, name: str = "") -> Any:
    """A field that is an option of the command.

    Args:
        default: Its value unless told otherwise. Of a tuple of numbers or names the
            command takes a list with commas between, of a dictionary JSON.
        help: What the user reads.
        *limits: The least and the greatest that are allowed.
        name: Of the option where it is not the field's.
    """
    metadata = {"help": help, "limits": limits, "name": name, "argument": False}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Options:
    """What a command takes; the limits of its fields are checked."""

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


def option_name(each: Field[Any]) -> str:
    """What the user calls a field."""
    return each.metadata["name"] or each.name.replace("_", "-")


def _plain(value: Any) -> Any:
    """As JSON has it; of a file its name, since folders are this machine's."""
    if isinstance(value, Path):
        return value.name
    return list(value) if isinstance(value, tuple) else value


def _check(each: Field[Any], value: Any) -> None:
    limits, name = each.metadata["limits"], option_name(each)
    if not limits or value is None:
        return
    if isinstance(value, tuple):
        check_numbers(name, value, limits)
    elif not limits[0] <= value <= limits[1]:  # refuses nan, too
        refuse(name, value, f"a number from {limits[0]:g} to {limits[1]:g}")


def check_numbers(field: str, values: Sequence[float], limits: Limits) -> None:
    """Check numbers of a list, each of which may be there once.

    Raises:
        ConfigError: One of them is beyond its limits or there twice, or there is none.
    """
    low, high = limits
    is_valid = all(low <= value <= high for value in values)
    if not values or not is_valid or len(set(values)) != len(values):
        refuse(
            field,
            ",".join(f"{value:g}" for value in values),
            f"numbers from {low:g} to {high:g}, each once, with commas between",
        )
