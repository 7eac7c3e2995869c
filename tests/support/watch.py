"""Looking into a running in-process engine: outcomes, rejected slots, counters."""

from collections.abc import Sequence
from typing import Any

from tests.support.engines import model_runner
from vllm_mtp.control.controller import Controller
from vllm_mtp.records import (
    DecodeRequest,
    DraftDecision,
    RejectedSlots,
    StepOutcome,
)


class ScriptedController:
    """Depths read from a list, over and over; every request gets the depth."""

    def __init__(self, depths: Sequence[int]) -> None:
        self.depths = depths
        self._num_steps = 0

    def decide(self, requests: Sequence[DecodeRequest]) -> DraftDecision:
        depth = self.depths[self._num_steps % len(self.depths)]
        self._num_steps += 1
        return DraftDecision(depth, {r.request_id: depth for r in requests}, "script")

    def may_draft(self) -> bool:
        return self.depths[self._num_steps % len(self.depths)] > 0

    def num_undecided_steps(self) -> int:
        coming = range(self._num_steps, self._num_steps + len(self.depths))
        depths = [self.depths[i % len(self.depths)] for i in coming]
        return next((i for i, depth in enumerate(depths) if depth), len(depths))

    def observe_undecided(self, outcomes: Sequence[StepOutcome]) -> None:
        self._num_steps += len(outcomes)

    def observe(self, outcome: StepOutcome) -> None:
        """The script is written."""


class RecordingController:
    """Passes everything on to the engine's own controller and remembers it."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.decisions: list[DraftDecision] = []
        self.outcomes: list[StepOutcome] = []

    def decide(self, requests: Sequence[DecodeRequest]) -> DraftDecision:
        self.decisions.append(self.controller.decide(requests))
        return self.decisions[-1]

    def may_draft(self) -> bool:
        return self.controller.may_draft()

    def num_undecided_steps(self) -> int:
        return self.controller.num_undecided_steps()

    def observe_undecided(self, outcomes: Sequence[StepOutcome]) -> None:
        self.outcomes += outcomes
        self.controller.observe_undecided(outcomes)

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)
        self.controller.observe(outcome)


def scheduler_of(llm: Any) -> Any:
    """The engine's scheduler."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def record_outcomes(llm: Any) -> RecordingController:
    """Put a recorder between the scheduler and its controller."""
    scheduler = scheduler_of(llm)
    scheduler.controller = RecordingController(scheduler.controller)
    return scheduler.controller


def play_script(llm: Any, depths: Sequence[int]) -> RecordingController:
    """Let a script decide about the depth of every step, and record it."""
    scheduler_of(llm).controller = ScriptedController(depths)
    return record_outcomes(llm)


def record_rejected_slots(llm: Any) -> list[RejectedSlots]:
    """Collect what the drafter announces after each verification."""
    announced: list[RejectedSlots] = []
    runner = model_runner(llm)
    drafter = getattr(runner, "drafter", None) or runner.speculator
    drafter.on_rejected_slots = announced.append
    return announced


def counter(llm: Any, name: str) -> int:
    """Any counter of vLLM, e.g. ``vllm:num_preemptions``."""
    return sum(int(m.value) for m in llm.get_metrics() if m.name == name)
