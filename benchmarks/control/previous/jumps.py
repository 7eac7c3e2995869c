"""How a machine's speed jumps, told from what steps of one kind take in a row."""

import math
import statistics
from collections.abc import Sequence

_LEVEL_VARIANCE = 2e-4
"""Growth, in each step, of the variance of all times together, as a fraction, where
nothing else is known. On a shared machine the speed wanders by several percent within
seconds (its Allan deviation is flat): a draft length that was tried in a bad moment
must not seem dear for ever."""
_MEMORY_STEPS = 200.0
_FEWEST_STEPS = 3


class Jumps:
    """How often the machine becomes faster or slower at once, and by how much.

    Some jump by 40 % every dozen steps. What a kind of step costs beside others does
    not change between two groups of that kind in a row, so that what differs there is
    the machine. If the level took its time to follow, the kind that is met after a
    jump would take the blame: verifying a draft token was believed to cost 1.45 plain
    steps where it cost 1.63.

    Groups are compared with each other, not with what was expected: of a kind of step
    that costs three times what was believed, one group does not say so to the end. In
    a batch where drafting doubles the time of a step that passed for a machine twice
    as slow, in which drafting seemed to pay: one start in ten went on with it for
    hundreds of steps, at 0.7 of the speed without.
    """

    def __init__(self) -> None:
        self.variance = _LEVEL_VARIANCE
        """Growth in each step, as in `_LEVEL_VARIANCE`."""
        self._last: tuple[object, int, float] | None = None

    def learn(self, kind: object, seconds: Sequence[float], noise: float) -> float:
        """Take note of a group of equal steps.

        Args:
            kind: What they have in common.
            seconds: Their times.
            noise: Typical deviation of one of them, as a fraction.

        Returns:
            Variance that the level has gained by a jump.
        """
        num_steps, typical_s = len(seconds), statistics.median(seconds)
        last, self._last = self._last, (kind, num_steps, typical_s)
        if last is None or last[0] != kind:
            return 0.0
        surprise = typical_s / last[2] - 1.0
        usual = noise**2 * (mean_variance(num_steps) + mean_variance(last[1]))
        # In fewer steps a single one that was disturbed looks the same.
        is_jump = min(num_steps, last[1]) >= _FEWEST_STEPS and surprise**2 > 4.0 * usual
        gained = surprise**2 - usual if is_jump else 0.0
        share = 1.0 - math.exp(-num_steps / _MEMORY_STEPS)
        wanted = self.variance + share * (gained / num_steps - self.variance)
        self.variance = max(wanted, _LEVEL_VARIANCE)
        return gained


def mean_variance(num_steps: int) -> float:
    """Variance of the mean of so many steps in a row, of one step's.

    Neighbouring steps are disturbed by the same things: a hundred of them are not
    worth a hundred.
    """
    return 1.0 / min(num_steps, 8)
