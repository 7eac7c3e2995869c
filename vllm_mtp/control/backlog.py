"""Finished steps that were not learned yet.

Learning runs in the thread that schedules. Where steps are short a GPU waits for that
thread, so several steps are learned at once.
"""

from collections.abc import Sequence

from vllm_mtp.records import StepOutcome

STEPS_AT_ONCE = 8
"""Steps without drafts are learned so many at a time, others four times as many."""
PERIOD_S = 0.1
"""Time between two searches for a plan, and at most between two lessons. Either takes
half a millisecond on a slow core, and nobody's traffic changes within that time."""
OUTCOMES_PER_S = 1000.0
"""Requests' outcomes learned in a second of serving: 1 % of it at 10 us each. Others
are left out, each time other ones."""


class Backlog:
    """Collects steps until it is time to learn from them."""

    def __init__(self) -> None:
        """Begin without any."""
        self._steps: list[StepOutcome] = []
        self._seconds = 0.0

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, outcome: StepOutcome) -> None:
        """A step is over. No clock is right for ever: it counts at most a second."""
        self._steps.append(outcome)
        if outcome.step_time_s > 0.0:
            self._seconds += min(outcome.step_time_s, 1.0)

    def is_due(self, is_off: bool, steps_until_search: int) -> bool:
        """Whether to learn now.

        Args:
            is_off: Drafting is disabled.
            steps_until_search: Steps after which the next plan is searched for.
        """
        last, most = self._steps[-1], STEPS_AT_ONCE if is_off else 4 * STEPS_AT_ONCE
        if len(self._steps) >= min(most, steps_until_search):
            return True
        if is_off:
            return bool(last.requests or last.shadow_drafts or last.draft_depth)
        return self._seconds >= PERIOD_S

    def take(self) -> tuple[Sequence[StepOutcome], float, int]:
        """The steps in order, their seconds, and how many outcomes may be learned."""
        taken, self._steps = self._steps, []
        seconds, self._seconds = self._seconds, 0.0
        return taken, seconds, max(int(OUTCOMES_PER_S * seconds), 4 * STEPS_AT_ONCE)
