"""How much may be spent on finding out.

A probe is a decision that is not the best one known; its price is the time it takes
beyond what its tokens would have taken at the best known goodput. The budget fills by
a fixed fraction of the time of every step, beginning with a grant that pays for trying
each draft length once, so what exploration costs is bounded by construction: in the
long run never more than ``fraction`` of the time by the estimates of the day.
"""

import math
from typing import NamedTuple


class ExplorationOptions(NamedTuple):
    """Bounds of exploration."""

    fraction: float = 0.010
    """Of the time that probes may cost in the long run."""
    comparing_fraction: float = 0.004
    """The same while nothing is verified, if drafts can be compared: cheaper probes."""
    far_share: float = 0.5
    """Of both while nothing is nearly good enough, even with luck: what can be found
    out is worth less."""
    grant_steps: float = 4.0
    """Budget at the start, in step times."""
    grant_lasts_steps: int = 200
    """How long the grant may be spent without pauses."""
    max_saved_steps: float = 1.5
    """Most that can be saved up later."""
    max_debt_steps: float = 0.5
    """Overdraft for following up on a surprise; later probes pay it back."""
    pause_steps: int = 16
    """Fewest steps between two probes once the grant is spent, surprises aside."""
    max_pause_steps: int = 128
    """The same after probes that changed nothing: each doubles the pause. A probe whose
    price is nothing by expectation still is not the best that could be done."""
    overdue_steps: int = 64
    """After so many steps without a probe one is granted on credit, up to
    ``max_saved_steps``: while drafting is off, more and more waits to be caught up on,
    so that looks get dearer half as fast as savings grow. Acceptance that had come back
    was not seen for 400 steps."""
    urgent_steps: int = 12
    """How long a surprise allows for overdraft and for probes without a pause."""
    max_slowdown: float = 4.0
    """A probe's step is never expected to take longer than this many best steps."""
    optimism: float = 1.0
    """Deviations above its expectation at which a decision is worth a probe."""
    sample_requests: int = 8
    """Requests that get a draft in a probe from K = 0: enough to see acceptance."""


class ExplorationBudget:
    """Time set aside for probes, in steps of the best plan."""

    def __init__(self, options: ExplorationOptions) -> None:
        self.options = options
        self.saved_steps = options.grant_steps
        self.steps_since_probe = 0
        self._pause_steps = options.pause_steps
        self._urgent_steps_left = 0
        self._grant_steps_left = options.grant_lasts_steps

    @property
    def is_granted(self) -> bool:
        """The grant of the start is not spent yet."""
        return self._grant_steps_left > 0

    @property
    def is_urgent(self) -> bool:
        """Acceptance has just changed."""
        return self._urgent_steps_left > 0

    def surprise(self) -> None:
        """Acceptance has changed: look closer now."""
        self._urgent_steps_left = self.options.urgent_steps
        self.be_curious()

    def be_curious(self) -> None:
        """Something is new: probes may follow each other closely again."""
        self._pause_steps = self.options.pause_steps

    def be_patient(self) -> None:
        """A probe of the usual kind: the next one may wait longer."""
        longest = self.options.max_pause_steps
        self._pause_steps = min(2 * self._pause_steps, longest)

    def disappoint(self) -> None:
        """A closer look has seen nothing: a few of these in a row end it."""
        left = self._urgent_steps_left - self.options.urgent_steps // 4
        self._urgent_steps_left = max(left, 0)

    def earn(self, is_comparing: bool = False, is_far: bool = False) -> None:
        """A step has passed.

        Args:
            is_comparing: Probes compare drafts and verify none.
            is_far: What they look for is far from paying.
        """
        options = self.options
        if self.saved_steps < options.max_saved_steps:
            earned = options.comparing_fraction if is_comparing else options.fraction
            self.saved_steps += (options.far_share if is_far else 1.0) * earned
        self.steps_since_probe += 1
        self._grant_steps_left = max(self._grant_steps_left - 1, 0)
        self._urgent_steps_left = max(self._urgent_steps_left - 1, 0)

    def can_pay(self, price_steps: float, is_pressing: bool = False) -> bool:
        """Whether a probe of this price would be granted now.

        Args:
            price_steps: In step times of the best plan, >= 0.
            is_pressing: The pause is the shortest, however many probes have changed
                nothing, and it is granted on credit.
        """
        is_free = self.is_granted or self.is_urgent
        pause = self.options.pause_steps if is_pressing else self._pause_steps
        if not is_free and self.steps_since_probe < pause:
            return False
        floor = -self.options.max_debt_steps if self.is_urgent else 0.0
        # Looks on credit must not be paid for by drafting on at a loss: while a debt
        # was earned back K = 0 was not tried, and drafting that lost a tenth and was
        # thought to lose nothing went on.
        if is_pressing or self.steps_since_probe >= self.options.overdue_steps:
            floor = -self.options.max_saved_steps
        # What can never be saved is granted once all that can be is, and paid back
        # later: a state that only a dear probe can end would last for ever.
        return (
            self.saved_steps - min(price_steps, self.options.max_saved_steps) >= floor
        )

    def steps_until_affordable(self, price_steps: float) -> int:
        """Steps for which `can_pay` surely stays False, whatever happens meanwhile.

        Of a probe that is not pressing: none is while drafting is off.

        Args:
            price_steps: As there.
        """
        if self.is_granted or self.is_urgent:
            return 0
        options = self.options
        pause = self._pause_steps - self.steps_since_probe
        missing = min(price_steps, options.max_saved_steps) - self.saved_steps
        most = max(options.fraction, options.comparing_fraction)
        until_saved = math.floor(missing / most)
        until_overdue = options.overdue_steps - self.steps_since_probe
        credit = math.floor((missing - options.max_saved_steps) / most)
        return max(pause, min(until_saved, max(until_overdue, credit)), 0)

    def pay(self, price_steps: float, is_pressing: bool = False) -> bool:
        """Take the price of a probe, or refuse it; see `can_pay`."""
        if not self.can_pay(price_steps, is_pressing):
            self._grant_steps_left = 0
            return False
        self.saved_steps -= price_steps
        self.steps_since_probe = 0
        return True
