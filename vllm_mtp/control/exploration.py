"""How much may be spent on finding out.

A probe is a decision that is not the best one known; its price is the time it takes
beyond what its tokens would have taken at the best known goodput. The budget fills by
a fixed fraction of the time of every step, beginning with a grant that pays for trying
each draft length once, so what exploration costs is bounded by construction: in the
long run never more than ``fraction`` of the time, whatever the estimates say.
"""

from typing import NamedTuple


class ExplorationOptions(NamedTuple):
    """Bounds of exploration."""

    fraction: float = 0.01
    """Of the time that probes may cost in the long run."""
    grant_steps: float = 4.0
    """Budget at the start, in step times."""
    max_saved_steps: float = 1.0
    """Most that can be saved up later."""
    max_debt_steps: float = 1.5
    """Overdraft for following up on a surprise; later probes pay it back."""
    max_slowdown: float = 4.0
    """A probe's step is never expected to take longer than this many best steps."""
    optimism: float = 1.0
    """Deviations above its expectation at which a decision is worth a probe."""


class ExplorationBudget:
    """Time set aside for probes, in steps of the best plan."""

    def __init__(self, options: ExplorationOptions) -> None:
        self.options = options
        self.saved_steps = options.grant_steps

    def earn(self) -> None:
        """A step has passed."""
        limit = max(self.options.max_saved_steps, self.saved_steps)
        self.saved_steps = min(self.saved_steps + self.options.fraction, limit)

    def pay(self, price_steps: float, is_urgent: bool) -> bool:
        """Take the price of a probe, or refuse it.

        Args:
            price_steps: In step times of the best plan, >= 0.
            is_urgent: Acceptance has just changed: the overdraft may be used.
        """
        floor = -self.options.max_debt_steps if is_urgent else 0.0
        if self.saved_steps - price_steps < floor:
            return False
        self.saved_steps -= price_steps
        return True
