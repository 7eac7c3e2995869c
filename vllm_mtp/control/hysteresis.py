"""When another depth is worth a change: one rule, in seconds.

A change costs `SWITCH_STEPS`, and a KV backfill where drafting resumes. It pays if what
the other depth gains in the time that it is expected to stay exceeds that. Where depths
change often, each stays for a short time, so the same gain is not enough any more: the
choice cannot flutter for long.
"""

from collections.abc import Sequence

from vllm_mtp.control.planner import Plan, goodput

SWITCH_STEPS = 0.5
"""Steps that a change of depth, or an exploration, costs beside what is known of it.
Tuning worlds: 0.5 to 1 are equally good, 2 and 4 lose."""
DWELL_STEPS = 128.0
"""Steps that a depth is expected to stay before any change was seen."""


class Hysteresis:
    """Learns how long a depth stays."""

    def __init__(self) -> None:
        """Begin with a guess."""
        self._dwell_steps = DWELL_STEPS
        self._steps = 0

    def pass_steps(self, num_steps: int) -> None:
        """So many steps have passed."""
        self._steps += num_steps

    def changed(self) -> None:
        """The depth has changed."""
        self._dwell_steps = (self._dwell_steps + self._steps) / 2
        self._steps = 0

    def choose(self, found: Sequence[Plan], depth: int, backfill_s: float) -> Plan:
        """The best plan, or that of the depth in use.

        Args:
            found: The best plan of each depth.
            depth: In use.
            backfill_s: Of the first step that drafts again.
        """
        best = max(found, key=goodput)
        kept = next((plan for plan in found if plan.depth == depth), best)
        cost_s = SWITCH_STEPS * kept.seconds + (0.0 if depth else backfill_s)
        dwell_s = max(self._dwell_steps, self._steps) * kept.seconds
        gained = best.goodput / kept.goodput - 1.0
        return best if gained * dwell_s > cost_s else kept
