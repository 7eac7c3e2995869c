"""What an evaluation of acceptance leaves behind: one JSON file, checked when read.

Counts are kept for every prompt, so that two files can be paired by prompt.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_mtp.tools.checked_file import read_checked


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
