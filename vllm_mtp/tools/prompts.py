"""Prompts: from a file, of a checkpoint, or built in."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vllm_mtp.config import ConfigError

PROMPTS_FILE = "heldout_prompts.jsonl"
"""In a checkpoint's folder: texts that it was not trained on."""

BUILT_IN = Path(__file__).parents[1] / "assets" / "eval_prompts.jsonl"


class Message(BaseModel):
    """Of a conversation, as in OpenAI's API."""

    model_config = ConfigDict(frozen=True)

    role: str
    content: str


class Prompt(BaseModel):
    """A text to be continued, or a conversation to be answered."""

    model_config = ConfigDict(frozen=True)

    id: str = Field(min_length=1)
    category: str = ""
    text: str | None = None
    messages: tuple[Message, ...] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> "Prompt":
        if not self.text and not self.messages:
            raise ValueError("neither text nor messages")
        return self

    @property
    def plain_text(self) -> str:
        """The text, or what was said, without a template."""
        if self.messages is None:
            return self.text or ""
        return "\n".join(message.content for message in self.messages)


def load_prompts(
    source: Path | None, model: str, num_prompts: int | None
) -> list[Prompt]:
    """The first prompts of a source.

    Args:
        source: A ``.jsonl`` with ``text``, ``prompt`` or ``messages`` on each line;
            None for what the checkpoint brings, or else the built-in set.
        model: Folder or name of the model.
        num_prompts: How many at most; None for all.

    Raises:
        ConfigError: The source cannot be read or holds no prompt.
    """
    own = Path(model) / PROMPTS_FILE
    path = source or (own if own.is_file() else BUILT_IN)
    prompts: list[Prompt] = []
    for number, (place, row) in enumerate(_lines(path), 1):
        if len(prompts) == num_prompts:
            break
        prompts.append(_prompt_of(row, number, place))
    if not prompts:
        raise ConfigError(f"prompts: {path} holds no prompt")
    ids = [prompt.id for prompt in prompts]
    twice = next((each for each in ids if ids.count(each) > 1), None)
    if twice is not None:
        raise ConfigError(f"prompts: {path} has two prompts with the id {twice!r}")
    return prompts


def fingerprint_of(prompts: list[Prompt]) -> str:
    """SHA-256 of all prompts."""
    dumped = json.dumps([prompt.model_dump() for prompt in prompts])
    return hashlib.sha256(dumped.encode()).hexdigest()


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text"
        raise ConfigError(f"prompts: {path} cannot be read: {reason}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except (ValueError, RecursionError):
                raise ConfigError(f"prompts: {path}:{number} is no JSON") from None


def _prompt_of(row: Any, number: int, place: str) -> Prompt:
    if not isinstance(row, Mapping):
        raise ConfigError(f"prompts: {place} is no object with text or messages")
    try:
        return Prompt(
            id=str(row.get("id", number)),
            category=str(row.get("category", "")),
            text=row.get("text") or row.get("prompt"),
            messages=row.get("messages"),
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        what = f"{where}: {message}" if where else message
        raise ConfigError(f"prompts: {place}: {what}") from None
