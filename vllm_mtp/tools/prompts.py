"""Prompts: from a file, of a checkpoint, or built in."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
    follow_ups: tuple[str, ...] = ()
    """What the user says after each answer, until there is no more."""

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

    def answered(self, text: str) -> "Prompt":
        """The conversation after an answer and the next follow-up."""
        answer = Message(role="assistant", content=text)
        question = Message(role="user", content=self.follow_ups[0])
        return self.model_copy(
            update={
                "messages": (*(self.messages or ()), answer, question),
                "follow_ups": self.follow_ups[1:],
            }
        )


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
    return read_prompts(path, num_prompts, _prompt_of)


def read_prompts(
    path: Path,
    num_prompts: int | None,
    make: Callable[[Mapping[str, Any], int], Prompt],
) -> list[Prompt]:
    """The first prompts of a ``.jsonl``.

    Args:
        path: The file.
        num_prompts: How many at most; None for all.
        make: Makes a prompt of what is in a line, an object, and its number.

    Raises:
        ConfigError: The file cannot be read or a line is no prompt.
    """
    prompts: list[Prompt] = []
    for number, (place, row) in enumerate(_lines(path), 1):
        if len(prompts) == num_prompts:
            break
        with _errors_at(place):
            prompts.append(make(row, number))
    if not prompts:
        raise ConfigError(f"prompts: {path} holds no prompt")
    ids = [prompt.id for prompt in prompts]
    twice = next((each for each in ids if ids.count(each) > 1), None)
    if twice is not None:
        raise ConfigError(f"prompts: {path} has two prompts with the id {twice!r}")
    return prompts


def fingerprint_of(prompts: list[Prompt]) -> str:
    """SHA-256 of all prompts."""
    dumped = json.dumps([_identity_of(prompt) for prompt in prompts])
    return hashlib.sha256(dumped.encode()).hexdigest()


def _identity_of(prompt: Prompt) -> dict[str, Any]:
    """As evaluations of 0.1 had it where there is a single question."""
    return prompt.model_dump(exclude=set() if prompt.follow_ups else {"follow_ups"})


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text"
        raise ConfigError(f"prompts: {path} cannot be read: {reason}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield f"{path}:{number}", _object_of(line, f"{path}:{number}")


def _object_of(line: str, place: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"prompts: {place} is no JSON") from None
    if not isinstance(row, Mapping):
        raise ConfigError(f"prompts: {place} is no object with text or messages")
    return row


def _prompt_of(row: Mapping[str, Any], number: int) -> Prompt:
    return Prompt(
        id=str(row.get("id", number)),
        category=str(row.get("category", "")),
        text=row.get("text") or row.get("prompt"),
        messages=row.get("messages"),
    )


@contextmanager
def _errors_at(place: str) -> Iterator[None]:
    """What is wrong with a line, in one sentence that names its field."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        what = f"{where}: {message}" if where else message
        raise ConfigError(f"prompts: {place}: {what}") from None
