"""What an evaluation of acceptance leaves behind: one JSON file, checked when read.

Counts are kept for every prompt, so that two files can be paired by prompt.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_mtp.config import ConfigError
from vllm_mtp.metrics.stats import SYNTHETIC_ACCEPTANCE
from vllm_mtp.tools.checked_file import read_checked
from vllm_mtp.tools.prompts import Prompt


class PromptRecord(BaseModel):
    """What became of the drafts of one prompt.

    A draft token at position j is *tested* if those before it were accepted; so
    ``accepted[j] / tested[j]`` is the conditional acceptance, however long drafts were.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(min_length=1)
    category: str = ""
    num_tokens: int = Field(ge=0)
    """New ones."""
    num_drafts: int = Field(ge=0)
    num_draft_tokens: int = Field(ge=0)
    tested: tuple[int, ...]
    accepted: tuple[int, ...]
    seconds: float = Field(ge=0)

    @model_validator(mode="after")
    def _is_consistent(self) -> "PromptRecord":
        if len(self.tested) != len(self.accepted):
            raise ValueError("tested and accepted differ in length")
        pairs = zip(self.tested, self.accepted, strict=True)
        if any(not 0 <= accepted <= tested for tested, accepted in pairs):
            raise ValueError("more accepted than tested")
        return self


class EvalFile(BaseModel):
    """An evaluation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    model: str
    prompts_sha256: str
    draft_length: int | Literal["auto"]
    """K of every request, or the controller's choice."""
    temperature: float
    max_tokens: int
    seconds: float = 0.0
    """All of it took; pauses are not counted."""
    records: tuple[PromptRecord, ...] = Field(min_length=1)
    provenance: dict[str, Any] = {}

    @property
    def num_positions(self) -> int:
        """Longest draft of all records."""
        return max(len(record.tested) for record in self.records)


def read_eval_file(path: Path) -> EvalFile:
    """Read and check a file.

    Raises:
        ConfigError: It cannot be read, is no evaluation, or contradicts itself.
    """
    return read_checked(path, EvalFile, "evaluation")


def merged(records: Sequence[PromptRecord]) -> PromptRecord:
    """Counts of all turns of a conversation.

    Args:
        records: Of the same prompt, at least one.
    """
    first = records[0]

    def summed(field: str) -> tuple[int, ...]:
        columns = zip_longest(*(getattr(each, field) for each in records), fillvalue=0)
        return tuple(map(sum, columns))

    return PromptRecord(
        id=first.id,
        category=first.category,
        num_tokens=sum(each.num_tokens for each in records),
        num_drafts=sum(each.num_drafts for each in records),
        num_draft_tokens=sum(each.num_draft_tokens for each in records),
        tested=summed("tested"),
        accepted=summed("accepted"),
        seconds=sum(each.seconds for each in records),
    )


METRICS_FLAG = "--per-request-spec-decode-metrics"


def record_of(
    prompt: Prompt,
    metrics: Mapping[str, Any] | None,
    draft_length: int | None,
    num_tokens: int,
    seconds: float,
) -> PromptRecord:
    """Counts of one request.

    Args:
        prompt: What was asked.
        metrics: vLLM's ``metrics.speculative_decoding``.
        draft_length: K that the request fixed; None for the controller's choice.
        num_tokens: New ones.
        seconds: From the request to its end.

    Raises:
        ConfigError: The metrics are missing, made up, or do not say enough.
    """
    if metrics is None:
        raise ConfigError(
            "server: its responses do not say what became of their drafts; serve with "
            f"method mtp_plus, or with {METRICS_FLAG} summary"
        )
    if metrics.get(SYNTHETIC_ACCEPTANCE):
        raise ConfigError(
            "server: it accepts drafts by chance, which says nothing about them; serve "
            "without rejection_sample_method 'synthetic'"
        )
    if metrics.get("per_step_drafted") is not None:
        steps = list(
            zip(metrics["per_step_drafted"], metrics["per_step_accepted"], strict=True)
        )
    else:
        steps = _steps_of(metrics, draft_length)
    longest = max((drafted for drafted, _ in steps), default=draft_length or 0)
    positions = range(1, longest + 1)
    return PromptRecord(
        id=prompt.id,
        category=prompt.category,
        num_tokens=num_tokens,
        num_drafts=len(steps),
        num_draft_tokens=sum(drafted for drafted, _ in steps),
        tested=tuple(
            sum(drafted >= j and accepted >= j - 1 for drafted, accepted in steps)
            for j in positions
        ),
        accepted=tuple(sum(accepted >= j for _, accepted in steps) for j in positions),
        seconds=seconds,
    )


def _steps_of(
    metrics: Mapping[str, Any], draft_length: int | None
) -> list[tuple[int, int]]:
    """(drafted, accepted) of each step, from a histogram of what was accepted."""
    num_steps, num_drafted = metrics["num_spec_steps"], metrics["num_draft_tokens"]
    if draft_length is None:
        raise ConfigError(
            "k: with auto drafts differ in length, so the server must list them: start "
            f"it with {METRICS_FLAG} detailed"
        )
    if num_drafted != draft_length * num_steps:
        raise ConfigError(
            f"k: {num_drafted} tokens in {num_steps} drafts are not {draft_length} "
            f"each, so the server must list them: start it with {METRICS_FLAG} detailed"
        )
    histogram: Sequence[int] = metrics["acceptance_histogram"]
    return [
        (draft_length, accepted)
        for accepted, count in enumerate(histogram)
        for _ in range(count)
    ]
