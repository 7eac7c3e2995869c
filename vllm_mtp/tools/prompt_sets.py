"""Spec-Bench and SPEED-Bench: prompts of two papers, as their files have them.

Fields and categories are those of https://github.com/hemingkx/Spec-Bench
(``question.jsonl``) and of https://huggingface.co/datasets/nvidia/SPEED-Bench when it
is prepared (vLLM's ``bench serve`` reads both). Users have the files: neither is part
of this package.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, field_validator, model_validator

from vllm_mtp.tools.prompts import Message, Prompt, read_prompts

Text = Annotated[str, Field(min_length=1)]

_MT_BENCH = "multi-turn conversation"
_CATEGORIES: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("writing", "roleplay", "reasoning", "math"),
            *("coding", "extraction", "stem", "humanities"),
        ),
        _MT_BENCH,
    ),
    "translation": "translation",
    "summarization": "summarization",
    "qa": "question answering",
    "math_reasoning": "mathematical reasoning",
    "rag": "retrieval-augmented generation",
}
"""The paper's categories by those of the file, of which MT-bench has eight."""

_NOT_PREPARED = "FULL BENCHMARK DATA SHOULD BE FETCHED"
"""Begins what SPEED-Bench has in the place of texts that it may not contain."""


class _Line(BaseModel):
    """What lines of both sets have in common."""

    question_id: int | Text
    category: Text
    turns: tuple[Text, ...] | None = Field(default=None, min_length=1)

    def prompt(self) -> Prompt:
        """The first question, and what the user says after each answer."""
        first, *others = self.turns or ()
        return Prompt(
            id=str(self.question_id),
            category=self.category,
            messages=(Message(role="user", content=first),),
            follow_ups=tuple(others),
        )


class _SpecBenchLine(_Line):
    turns: tuple[Text, ...] = Field(min_length=1)

    @field_validator("category")
    @classmethod
    def _as_in_the_paper(cls, value: str) -> str:
        if value not in _CATEGORIES:
            raise ValueError(f"{value!r} is none of {', '.join(_CATEGORIES)}")
        return _CATEGORIES[value]


class _SpeedBenchLine(_Line):
    messages: tuple[Message, ...] | None = Field(default=None, min_length=1)
    """In prepared files: the user's turns, without answers between."""

    @model_validator(mode="after")
    def _has_turns(self) -> "_SpeedBenchLine":
        if self.messages is not None:
            if any(message.role != "user" for message in self.messages):
                raise ValueError("messages: all must be of the user")
            self.turns = tuple(message.content for message in self.messages)
        if not self.turns:
            raise ValueError("neither messages nor turns")
        if any(turn.startswith(_NOT_PREPARED) for turn in self.turns):
            raise ValueError("turns: the text is missing; prepare the set first")
        return self


_LINES: Mapping[str, type[_Line]] = {
    "spec-bench": _SpecBenchLine,
    "speed-bench": _SpeedBenchLine,
}
SETS = tuple(_LINES)
"""Their names."""


def load_set(name: str, path: Path, num_prompts: int | None) -> list[Prompt]:
    """The first prompts of a set.

    Args:
        name: Of `SETS`.
        path: The user's file.
        num_prompts: How many at most; None for all.

    Raises:
        ConfigError: The file cannot be read or a line is none of that set.
    """

    def make(row: Mapping[str, Any], number: int) -> Prompt:
        return _LINES[name].model_validate(row).prompt()

    return read_prompts(path, num_prompts, make)
