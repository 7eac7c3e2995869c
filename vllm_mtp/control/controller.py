"""The protocol every controller speaks.

A controller sees which requests will decode and answers how many draft tokens each
of them gets; after verification it learns what came of it. It never sees vLLM.
"""

from collections.abc import Sequence
from typing import Protocol

from vllm_mtp.records import DecodeRequest, DraftDecision, StepOutcome


class Controller(Protocol):
    """Chooses the draft length of every request and step."""

    def decide(self, requests: Sequence[DecodeRequest]) -> DraftDecision:
        """Choose K for the drafts that are about to be proposed.

        Called once a step, before the step runs; its drafts are verified one step
        later. Must not be slow: it is on the scheduler's path.
        """
        ...

    def may_draft(self) -> bool:
        """Whether the next ``decide`` may choose a depth above 0, pins aside.

        Asked when a step is scheduled, because KV slots for drafts are reserved then:
        after False the next depth must be 0.
        """
        ...

    def num_undecided_steps(self) -> int:
        """Steps, the next one included, that need no decision: none would draft.

        Asked after ``may_draft`` was False. Goes for a batch that stays the same and
        verifies nothing. Instead of ``may_draft``, ``decide`` and ``observe`` one call
        of ``observe_undecided`` may follow after any number of them.
        """
        ...

    def observe_undecided(self, outcomes: Sequence[StepOutcome]) -> None:
        """These steps have passed without a decision."""
        ...

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a finished step."""
        ...

    def allow_any_mix(self) -> None:
        """No draft length, nor any mix of them, is dearer than others from now on."""
        ...


class DecidesEveryStep:
    """Part of a controller that wants to be asked in every step, and never cares which
    draft lengths have CUDA graphs."""

    def num_undecided_steps(self) -> int:
        return 0

    def observe_undecided(self, outcomes: Sequence[StepOutcome]) -> None:
        """It never rests."""

    def allow_any_mix(self) -> None:
        """It has chosen from all of them anyhow."""
