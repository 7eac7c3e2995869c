"""Checks of what a user chose, each with the one sentence that the user reads. Pure."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from vllm_mtp.config import METHOD, SYNTHETIC, ConfigError

Value = TypeVar("Value", str, int, float)
Limits = tuple[float, float]
"""The least and the greatest that are allowed."""

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def refuse(field: str, value: object, allowed: str) -> NoReturn:
    """Raise the sentence that the user reads."""
    raise ConfigError(f"{field}: {value!r} is not allowed; must be {allowed}")


def parse_list(field: str, text: str, kind: type[Value]) -> tuple[Value, ...]:
    """A comma-separated option.

    Raises:
        ConfigError: A part is not of that kind.
    """
    try:
        return tuple(kind(part.strip()) for part in text.split(","))
    except ValueError:
        words = "whole numbers" if kind is int else "numbers"
        refuse(field, text, f"{words} with commas between")


def check_names(field: str, values: Sequence[str], known: Sequence[str]) -> None:
    """Check names of a list, each of which may be there once.

    Raises:
        ConfigError: One of them is unknown or there twice, or there is none.
    """
    unknown = [value for value in values if value not in known]
    if unknown or not values or len(set(values)) != len(values):
        wrong = unknown[0] if unknown else ",".join(values)
        refuse(field, wrong, f"of {', '.join(known)}, each once, with commas between")


def check_name(field: str, value: str, known: Sequence[str]) -> None:
    """Check a name.

    Raises:
        ConfigError: It is unknown.
    """
    if value not in known:
        refuse(field, value, f"one of {', '.join(known)}")


def check_output(path: Path | None) -> None:
    """Check before anything is measured that a result can be written.

    Raises:
        ConfigError: Its folder does not exist.
    """
    if path is not None and not path.absolute().parent.is_dir():
        refuse("output", str(path), "a file in a folder that exists")


def check_method(config: Mapping[str, object]) -> None:
    """Check that a speculative config is one of ours, and one that can be exact.

    Raises:
        ConfigError: It names another method, or its acceptance is synthetic.
    """
    method = config.get("method")
    if method != METHOD:
        refuse("speculative-config", {"method": method}, f"of method {METHOD!r}")
    check_verifies(config)


def check_verifies(config: Mapping[str, object]) -> None:
    """Check that drafts of a speculative config are verified by the target.

    Raises:
        ConfigError: Its acceptance is synthetic.
    """
    for key, value in config.items():
        # As vLLM reads keys.
        name = key.replace("-", "_")
        if name == "rejection_sample_method" and value == SYNTHETIC:
            raise ConfigError(
                f"speculative-config: {key} {SYNTHETIC!r} is not allowed; it accepts "
                "drafts by chance, which says nothing about texts or drafts"
            )


def resolve_model(model: str) -> str:
    """Find a checkpoint before an engine is started for it.

    Returns:
        What vLLM is given.

    Raises:
        ConfigError: The folder is missing or holds no checkpoint.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model: {folder} holds no config.json")
        return str(folder.resolve())
    if HUB_NAME.fullmatch(model):
        return model
    raise ConfigError(
        f"model: {str(folder)!r} is neither a folder with a checkpoint nor a name "
        "on the hub (owner/name)"
    )
