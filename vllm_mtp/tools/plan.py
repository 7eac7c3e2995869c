"""The arithmetic of speculation: what a draft length gains, and up to which batch.

A step with draft length K commits ``L(K) = 1 + S_1 + .. + S_K`` tokens of a request
(`acceptance`) and takes the time of verifying K + 1 rows of each request and of K draft
steps. Its speedup is L(K) over that time in steps without speculation.

The time comes from one of two sources:

- the doctor's probe, which timed steps of several K: then it is what was seen, on a
  straight line between them, for the batch of the probe;
- a machine and a model by their data sheets (`RooflineCost` states its assumptions):
  then it depends on the batch, and there is a batch from which on no K pays.

Assumed in all: all requests accept alike and use the same K, positions after the last
given one accept like it, nobody waits for prompts; but for the probe a draft step costs
the same at each position.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vllm_mtp.acceptance import (
    expected_acceptance_length,
    speedup,
    survival,
)
from vllm_mtp.config import MAX_DRAFT_LENGTH
from vllm_mtp.tools.option_checks import refuse
from vllm_mtp.tools.plan_cost import DENSE_7B, H100, Hardware, Model, RooflineCost

MAX_BATCH = 1024


class StepTime(NamedTuple):
    """Of a step, in steps of the same batch without speculation."""

    verifying: float
    """Of the target alone."""
    whole: float
    """With its draft steps."""


StepTimes = Callable[[int, int], StepTime]
"""Of a batch and a draft length."""


class Row(NamedTuple):
    """What one draft length promises at one batch."""

    batch: int
    draft_length: int
    acceptance_length: float
    speedup_if_drafts_were_free: float
    speedup: float


@dataclass(frozen=True)
class ProbedStep:
    """Of one draft length that was timed, in steps without speculation."""

    draft_length: int
    verifying: float
    """Of the target alone."""
    whole: float
    """With its draft steps."""


@dataclass(frozen=True)
class PlanOptions:
    """What the user chose.

    Attributes:
        acceptance: Conditional acceptance of each position; the last one repeats.
        max_draft_length: Largest K of the table.
        probe: What the doctor timed, from K = 0 on; empty for a machine.
        hardware: One accelerator.
        model: What it runs.
        num_gpus: That share the model.
        is_fp8: Weights in 8 bits.
        batches: Requests at a time; of measured times only the first is meant.
        context_tokens: Of every request.
    """

    acceptance: tuple[float, ...] = (0.8,)
    max_draft_length: int = 8
    probe: tuple[ProbedStep, ...] = ()
    hardware: Hardware = H100
    model: Model = DENSE_7B
    num_gpus: int = 1
    is_fp8: bool = False
    batches: tuple[int, ...] = (1, 4, 16, 64, 256)
    context_tokens: int = 2048

    def __post_init__(self) -> None:
        """Check every option.

        Raises:
            ConfigError: One of them has a value that is not allowed.
        """
        for value in self.acceptance:
            if not 0 <= value <= 1:
                refuse("acceptance", value, "numbers from 0 to 1")
        limits: dict[str, tuple[float, float]] = {
            "max_draft_length": (1, MAX_DRAFT_LENGTH),
            "num_gpus": (1, 4096),
            "context_tokens": (0, 10**7),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not low <= value <= high:
                allowed = f"a number from {low:g} to {high:g}"
                refuse(name.replace("_", "-"), value, allowed)
        if self.probe and self.max_draft_length > self.probe[-1].draft_length:
            longest = self.probe[-1].draft_length
            allowed = f"at most {longest}, the longest that was probed"
            refuse("max-draft-length", self.max_draft_length, allowed)
        for batch in self.batches:
            if not 1 <= batch <= MAX_BATCH:
                refuse("batch", batch, f"numbers from 1 to {MAX_BATCH}")

    @property
    def is_measured(self) -> bool:
        """Whether times were measured, at one batch."""
        return bool(self.probe)

    @property
    def survival(self) -> list[float]:
        """``S_1`` to ``S_K_max``."""
        missing = self.max_draft_length - len(self.acceptance)
        repeated = (*self.acceptance, *[self.acceptance[-1]] * max(0, missing))
        return survival(repeated[: self.max_draft_length])

    @property
    def step_times(self) -> StepTimes:
        """From the source that the user chose."""
        if self.probe:
            return probed_times(self.probe)
        cost = RooflineCost(self.hardware, self.model, self.num_gpus, self.is_fp8)
        return roofline_times(cost, self.context_tokens)


class Plan(NamedTuple):
    """What the arithmetic says."""

    rows: list[Row]
    best: dict[int, Row]
    """By batch; draft length 0 where nothing pays."""
    stops_paying_at: int | None
    """Smallest batch from which on no K pays; None within `MAX_BATCH`, or unknown."""


def make_plan(options: PlanOptions) -> Plan:
    """Rows of all batches and draft lengths, and the best of each batch."""
    batches = options.batches[:1] if options.is_measured else options.batches
    rows = [row for batch in batches for row in rows_of(options, batch)]
    best = {batch: best_of(rows_of(options, batch)) for batch in batches}
    stops = None if options.is_measured else stops_paying_at(options)
    return Plan(rows, best, stops)


def rows_of(options: PlanOptions, batch: int) -> list[Row]:
    """Of K = 0 to the largest, at one batch."""
    times, survives = options.step_times, options.survival
    rows = []
    for draft_length in range(options.max_draft_length + 1):
        time = times(batch, draft_length)
        length = expected_acceptance_length(survives, draft_length)
        rows.append(
            Row(
                batch,
                draft_length,
                length,
                speedup(length, time.verifying),
                speedup(length, time.whole),
            )
        )
    return rows


def best_of(rows: Sequence[Row]) -> Row:
    """The fastest; the shortest draft among equals."""
    return max(rows, key=lambda row: (row.speedup, -row.draft_length))


def stops_paying_at(options: PlanOptions) -> int | None:
    """Smallest batch from which on every larger one is best left alone."""
    stops = None
    for batch in range(MAX_BATCH, 0, -1):
        if best_of(rows_of(options, batch)).draft_length:
            return stops
        stops = batch
    return stops


def probed_times(probe: Sequence[ProbedStep]) -> StepTimes:
    """From steps that the doctor timed."""
    lengths = [step.draft_length for step in probe]

    def times(batch: int, draft_length: int) -> StepTime:
        return StepTime(
            float(np.interp(draft_length, lengths, [s.verifying for s in probe])),
            float(np.interp(draft_length, lengths, [s.whole for s in probe])),
        )

    return times


def roofline_times(cost: RooflineCost, context_tokens: int) -> StepTimes:
    """From data sheets."""

    def times(batch: int, draft_length: int) -> StepTime:
        context = float(batch * context_tokens)
        rows = np.array([batch, batch * (draft_length + 1)], dtype=float)
        plain_s, verifying_s = map(float, cost.verify_s(batch, rows, context, True))
        drafting_s = cost.draft_s(batch, draft_length, context)
        return StepTime(verifying_s / plain_s, (verifying_s + drafting_s) / plain_s)

    return times
