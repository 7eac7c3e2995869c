"""Finished steps that were not learned yet.

Learning runs in the thread that schedules. Where steps are short a GPU waits for that
thread, so several steps are learned at once.
"""

from collections.abc import Sequence

from vllm_mtp.records import StepOutcome

STEPS_AT_ONCE = 8
"""Short steps, and steps without drafts, are learned so many at a time: what a call
costs beside its work is then less than a tenth of it."""
OUTCOMES_PER_S = 2000.0
"""Requests' outcomes learned in a second of serving: 2 % of it at 10 us each. A step
that affords fewer than `STEPS_AT_ONCE` (4 ms) is short."""


class Backlog:
    """Collects steps until it is time to learn from them."""

    def __init__(self) -> None:
        """Begin without any."""
        self._steps: list[StepOutcome] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, outcome: StepOutcome) -> None:
        """A step is over."""
        self._steps.append(outcome)

    def is_due(self, is_off: bool, steps_until_search: int) -> bool:
        """Whether to learn now.

        Args:
            is_off: Drafting is disabled.
            steps_until_search: Steps after which the next plan is searched for.
        """
        if len(self._steps) >= min(STEPS_AT_ONCE, steps_until_search):
            return True
        last = self._steps[-1]
        if is_off:
            return bool(last.requests or last.shadow_drafts or last.draft_depth)
        return last.step_time_s * OUTCOMES_PER_S >= STEPS_AT_ONCE

    def take(self) -> tuple[Sequence[StepOutcome], float]:
        """The steps in order, and their seconds; none is left.

        No clock is right for ever: a step counts at most a second.
        """
        taken, self._steps = self._steps, []
        return taken, sum(min(s.step_time_s, 1.0) for s in taken if s.step_time_s > 0.0)


def affordable_outcomes(seconds: float) -> int:
    """How many requests' outcomes may be learned from in so much time."""
    return max(int(OUTCOMES_PER_S * seconds), 4 * STEPS_AT_ONCE)
