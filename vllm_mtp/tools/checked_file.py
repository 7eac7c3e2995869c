"""JSON files of users: read, checked, and refused in one sentence."""

from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from vllm_mtp.config import ConfigError

Content = TypeVar("Content")


def read_checked(path: Path, kind: type[Content], what: str) -> Content:
    """Read a file and check each field.

    Raises:
        ConfigError: It cannot be read, or is not of that kind.
    """
    try:
        return TypeAdapter(kind).validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text"
        raise ConfigError(f"{path} cannot be read: {reason}") from None
    except ValidationError as error:
        why = first_problem(error)
        raise ConfigError(f"{path} is no {what} of this version: {why}") from None


def first_problem(error: ValidationError) -> str:
    """What is wrong in a file, in a few words: the first field and why."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]
