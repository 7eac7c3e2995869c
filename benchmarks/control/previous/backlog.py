"""Steps that are over and were not learned yet.

Learning goes on in the thread that schedules, so it may wait until several steps can be
learned at once, or until a slow step hides it, and must not take more of a fast step
than it is worth.
"""

from collections.abc import Sequence

from vllm_mtp.records import StepOutcome

_STEPS_AT_ONCE = 8
"""Steps without drafts are learned so many at a time, and those with drafts where they
are short: after a pass of the target the caches hold nothing of ours, so what is done
once costs several times what is repeated."""
_SHORT_STEP_S = 0.006
"""A GPU that is done with a step so soon waits for the Python thread that schedules the
next one, and the same thread learns: 0.2 ms for a step learned alone."""
_STEPS_ALONE = 256
"""At first each step is learned at once even so."""

_OUTCOME_S = 10e-6
"""What learning of one request in one step takes, about."""
_LEARNING_SHARE = 0.02
"""Of the time of the steps that may go into it: of a large batch of short steps, for
which a fast GPU waits, some outcomes are left out."""
_FEWEST_OUTCOMES = 32


class Backlog:
    """Collects steps until it is time to learn from them."""

    def __init__(self) -> None:
        """Begin without any."""
        self._steps: list[StepOutcome] = []
        self._num_taken = 0

    def add(self, outcome: StepOutcome) -> None:
        """A step is over."""
        self._steps.append(outcome)

    def must_be_learned(self, is_off: bool, steps_until_search: int) -> bool:
        """Whether it is time, now that another step is over.

        Args:
            is_off: Drafting is off.
            steps_until_search: The next plan is looked for when so many were learned.
        """
        if len(self._steps) >= _STEPS_AT_ONCE:
            return True
        last = self._steps[-1]
        if is_off:
            return bool(last.requests or last.compared or last.draft_depth)
        is_long = last.step_time_s >= _SHORT_STEP_S
        is_new = self._num_taken < _STEPS_ALONE
        return is_long or is_new or len(self._steps) >= steps_until_search

    def affordable_outcomes(self) -> int:
        """How many requests' outcomes may be learned from."""
        # No clock is right for ever: what is no number of seconds counts as none.
        times = (min(s.step_time_s, 1.0) for s in self._steps if s.step_time_s > 0.0)
        return max(int(_LEARNING_SHARE * sum(times) / _OUTCOME_S), _FEWEST_OUTCOMES)

    def take(self) -> Sequence[StepOutcome]:
        """The steps, in their order; none is left."""
        taken, self._steps = self._steps, []
        self._num_taken += len(taken)
        return taken
