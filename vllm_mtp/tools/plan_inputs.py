"""What a plan starts from: numbers, evaluations, probes, and machines and models.

A machine or a model is one of those that are known by name or a JSON file with the
fields of `Hardware` or `Model`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, Field, PositiveFloat, field_validator

from vllm_mtp.acceptance import conditional_acceptance
from vllm_mtp.config import ConfigError
from vllm_mtp.tools.checked_file import read_checked
from vllm_mtp.tools.eval_file import read_eval_file
from vllm_mtp.tools.option_checks import parse_list, refuse
from vllm_mtp.tools.plan import ProbedStep
from vllm_mtp.tools.plan_cost import (
    B200,
    DENSE_7B,
    DENSE_70B,
    H100,
    H200,
    MOE_671B,
    Hardware,
    Model,
)

HARDWARE = {"h100": H100, "h200": H200, "b200": B200}
MODELS = {"dense-7b": DENSE_7B, "dense-70b": DENSE_70B, "moe-671b": MOE_671B}

Described = TypeVar("Described", Hardware, Model)


class _ProbedLength(BaseModel):
    draft_length: int = Field(ge=0)
    step_seconds: PositiveFloat
    draft_seconds: float = Field(ge=0)


class Probe(BaseModel):
    """What a plan needs of the doctor's probe."""

    survival: tuple[float, ...] = Field(min_length=1)
    lengths: tuple[_ProbedLength, ...] = Field(min_length=2)

    @field_validator("lengths")
    @classmethod
    def _start_without_drafts(
        cls, lengths: tuple[_ProbedLength, ...]
    ) -> tuple[_ProbedLength, ...]:
        numbers = [each.draft_length for each in lengths]
        if numbers[0] or numbers != sorted(set(numbers)):
            raise ValueError("draft lengths must rise from 0")
        return lengths

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Conditional, of each position."""
        return tuple(conditional_acceptance(self.survival))

    @property
    def steps(self) -> tuple[ProbedStep, ...]:
        """Times in steps without speculation."""
        unit = self.lengths[0].step_seconds
        return tuple(
            ProbedStep(
                each.draft_length,
                (each.step_seconds - each.draft_seconds) / unit,
                each.step_seconds / unit,
            )
            for each in self.lengths
        )


class _DoctorReport(BaseModel):
    probe: Probe | None


def read_probe(path: Path) -> Probe:
    """From what ``vllm-mtp doctor --probe --json`` printed.

    Raises:
        ConfigError: It cannot be read, or holds no probe.
    """
    report = read_checked(path, _DoctorReport, "report of the doctor")
    if report.probe is None:
        refuse("probe", str(path), "a report of the doctor with --probe")
    return report.probe


def read_acceptance(text: str) -> tuple[float, ...]:
    """Conditional acceptance of each position, of numbers or of an evaluation.

    Raises:
        ConfigError: It is neither, or nothing was drafted in that evaluation.
    """
    path = Path(text)
    if path.suffix == ".json" or path.is_file():
        return _measured_acceptance(path)
    return parse_list("acceptance", text, float)


def _measured_acceptance(path: Path) -> tuple[float, ...]:
    records = read_eval_file(path).records
    shares = []
    for position in range(max(len(record.tested) for record in records)):
        reached = [record for record in records if position < len(record.tested)]
        tested = sum(record.tested[position] for record in reached)
        if not tested:
            break
        shares.append(sum(record.accepted[position] for record in reached) / tested)
    if not shares:
        raise ConfigError(f"acceptance: no draft was tested in {path}")
    return tuple(shares)


def read_hardware(text: str) -> Hardware:
    """An accelerator by its name or by a file.

    Raises:
        ConfigError: There is none, or the file is wrong.
    """
    return _named_or_described("hardware", text, HARDWARE, Hardware)


def read_model(text: str) -> Model:
    """A model by its name or by a file.

    Raises:
        ConfigError: There is none, or the file is wrong.
    """
    return _named_or_described("model", text, MODELS, Model)


def _named_or_described(
    field: str, text: str, known: Mapping[str, Described], kind: type[Described]
) -> Described:
    if text in known:
        return known[text]
    path = Path(text)
    if path.suffix != ".json" and not path.is_file():
        names = ", ".join(known)
        refuse(field, text, f"one of {names} or a JSON file that describes it")
    return read_checked(path, kind, f"description of {field}")
