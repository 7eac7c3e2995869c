"""Steps that go like the one before and need no decision.

While drafting is disabled nothing depends on a step but its time. Between two passes of
the target the processor's caches hold nothing of ours, so that work for one step costs
a quarter of a millisecond, and for eight at once hardly more.
"""

from collections.abc import Sequence
from typing import Any

from vllm_mtp.integration.worker.drafting_disabled import repeats

MAX_STEPS = 8
"""Without a decision. What they took is delivered afterwards, all at once."""


class UndecidedSteps:
    """A batch whose next steps may need no decision."""

    def __init__(self) -> None:
        """The next step is decided."""
        self.request_ids: list[str] = []
        """The batch: all decode, one row each, and sample a token."""
        self.num_left = 0
        """Steps that need no decision, as far as the controller is concerned."""
        self._num_scheduled = 0
        self._may_repeat = False

    def may_begin(self, request_ids: Sequence[str]) -> None:
        """The step just decided drafts nothing and verifies nothing.

        Args:
            request_ids: Of its batch, in the scheduler's order.
        """
        self.request_ids, self._may_repeat, self.num_left = [*request_ids], True, 0

    def begin(self, num_steps: int) -> None:
        """Nothing will be drafted for a batch like the last one.

        Args:
            num_steps: For how long, the step that is being scheduled included.
        """
        self.num_left = min(num_steps, MAX_STEPS) if self._may_repeat else 0

    def goes_on(self, scheduler_output: Any) -> bool:
        """Whether the step just scheduled is one of them, or needs a decision."""
        if not self.num_left or not repeats(scheduler_output, self.request_ids):
            return False
        self.num_left -= 1
        self._num_scheduled += 1
        return True

    def end(self) -> None:
        """The batch is another one, or somebody wants to decide."""
        self.num_left, self._may_repeat = 0, False

    def take(self) -> int:
        """Steps that went without a decision since the last call."""
        num_steps, self._num_scheduled = self._num_scheduled, 0
        return num_steps
