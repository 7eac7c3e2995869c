"""The stated targets of rollback, each with what was measured for it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.rollback.layouts import MLA
from benchmarks.rollback.metadata import MetadataResult
from benchmarks.rollback.options import (
    TARGET_BATCH,
    TARGET_DRAFT_LENGTH,
    TARGET_LAYERS,
)
from benchmarks.rollback.payload import PayloadCase, PayloadResult

TARGET_GPU = "H200"
MAX_METADATA_US = 6.0
MIN_COPY_FRACTION = 0.6
MAX_SCRUB_US_AT_BATCH_1 = 6.0
MAX_AS_CALLED_OVER_CHAIN = 1.0
NOT_MEASURED = "its case was left out, or has no device time"


@dataclass(frozen=True)
class Target:
    """A limit and what was measured.

    Attributes:
        name: What is limited, with its unit.
        comparison: ``<=`` or ``>=``: how the value must be to the limit.
        limit: That is stated.
        value: Median that was measured; None where it was not.
        why_not_judged: Why the target does not apply here; None where it does.
    """

    name: str
    comparison: str
    limit: float
    value: float | None
    why_not_judged: str | None = None

    @property
    def passed(self) -> bool | None:
        """None where the target does not apply or nothing was measured for it."""
        if self.why_not_judged is not None or self.value is None:
            return None
        if self.comparison == "<=":
            return self.value <= self.limit
        return self.value >= self.limit

    def as_json(self) -> dict[str, Any]:
        """For the result file."""
        return {**asdict(self), "passed": self.passed}


def judge(
    backend: str,
    metadata: Sequence[MetadataResult],
    payload: Sequence[PayloadResult],
    copy_gb_per_s: float,
    device_name: str,
    device_type: str,
) -> list[Target]:
    """All targets, those that do not apply included."""
    if device_type == "cuda":
        applies = TARGET_GPU in device_name
        why_not = None if applies else f"stated for an NVIDIA {TARGET_GPU}"
        values = _gpu_values(backend, metadata, payload, copy_gb_per_s)
        ratios = _ratio_targets(backend, metadata, "stated for CPUs")
        return [*_gpu_targets(values, why_not), *ratios]
    why_not = f"stated for an NVIDIA {TARGET_GPU}"
    nothing = (None, None, None)
    return [
        *_gpu_targets(nothing, why_not),
        *_ratio_targets(backend, metadata, None),
    ]


def _gpu_values(
    backend: str,
    metadata: Sequence[MetadataResult],
    payload: Sequence[PayloadResult],
    copy_gb_per_s: float,
) -> tuple[float | None, float | None, float | None]:
    """Device times only: what the host adds has no place in these targets."""
    at_batch = [each for each in metadata if each.case.batch == TARGET_BATCH]
    times = [_device_us(each, backend) for each in at_batch]
    metadata_us = max((each for each in times if each is not None), default=None)
    large, small = (_find(payload, _scrub_case(batch)) for batch in (TARGET_BATCH, 1))
    fraction = None
    if large is not None and _device_us(large, backend) is not None:
        fraction = large.gb_per_s(backend).median / copy_gb_per_s
    scrub_us = None if small is None else _device_us(small, backend)
    return metadata_us, fraction, scrub_us


def _gpu_targets(
    values: tuple[float | None, float | None, float | None], why_not: str | None
) -> list[Target]:
    scrub = f"scrub of {TARGET_LAYERS} MLA layers, K={TARGET_DRAFT_LENGTH}, batch"
    stated = [
        (f"metadata, batch {TARGET_BATCH}, worst K, us", "<=", MAX_METADATA_US),
        (f"{scrub} {TARGET_BATCH}, share of copy bandwidth", ">=", MIN_COPY_FRACTION),
        (f"{scrub} 1, us", "<=", MAX_SCRUB_US_AT_BATCH_1),
    ]
    return [
        Target(*limit, value, why_not or (NOT_MEASURED if value is None else None))
        for limit, value in zip(stated, values, strict=True)
    ]


def _ratio_targets(
    backend: str, metadata: Sequence[MetadataResult], why_not: str | None
) -> list[Target]:
    """One for each batch: the worst draft length."""
    targets = []
    for batch in dict.fromkeys(each.case.batch for each in metadata):
        ratios = [each.ratio(backend) for each in metadata if each.case.batch == batch]
        value = max((ratio.median for ratio in ratios if ratio), default=None)
        reason = why_not or (
            "vLLM's chain does not run here" if value is None else None
        )
        name = f"as called / vLLM's chain, batch {batch}, worst K"
        targets.append(Target(name, "<=", MAX_AS_CALLED_OVER_CHAIN, value, reason))
    return targets


def _scrub_case(batch: int) -> PayloadCase:
    return PayloadCase(MLA.name, batch, TARGET_DRAFT_LENGTH, TARGET_LAYERS, "all")


def _find(payload: Sequence[PayloadResult], case: PayloadCase) -> PayloadResult | None:
    return next((each for each in payload if each.case == case), None)


def _device_us(result: MetadataResult | PayloadResult, backend: str) -> float | None:
    spread = result.timings[backend].device_us
    return None if spread is None else spread.median
