"""Steps that go like the one before and need no decision.

While drafting is off nothing depends on a step but its time. What is written down of it
waits for a few more: between two passes of the target the processor's caches hold
nothing of ours, so that doing little in each step costs a quarter of a millisecond,
and doing it for eight of them at once hardly more.
"""

from collections.abc import Collection
from typing import Any

from vllm_mtp.integration.scheduled_steps import ScheduledStep
from vllm_mtp.records import StepOutcome

MAX_STEPS = 8
"""That wait to be told."""


class RestingSteps:
    """Steps of one batch that nobody has heard of yet."""

    def __init__(self) -> None:
        """Nothing rests."""
        self.outcomes: list[StepOutcome] = []
        """Of those whose output is here."""
        self.num_scheduled = 0
        self.request_ids: Collection[str] = ()
        """The batch: all decode, one row each, and sample a token."""
        self.num_left = 0
        """Steps that need no decision, as far as the controller is concerned."""
        self._last: ScheduledStep | None = None

    def may_begin(self, request_ids: Collection[str], step: ScheduledStep) -> None:
        """The next steps may be like this one."""
        self.request_ids, self._last, self.num_left = request_ids, step, 0

    def begin(self, num_steps: int) -> None:
        """Nothing will be drafted for a batch like the last one.

        Args:
            num_steps: For how long, the step that is being scheduled included.
        """
        self.num_left = min(num_steps, MAX_STEPS) if self._last is not None else 0

    def goes_on(self, scheduler_output: Any) -> ScheduledStep | None:
        """What is known of the step just scheduled; None if it needs a decision."""
        if not self.num_left or self._last is None:
            return None
        rows_of, output = scheduler_output.num_scheduled_tokens, scheduler_output
        if (
            output.total_num_scheduled_tokens != len(self.request_ids)
            or output.scheduled_spec_decode_tokens
            or output.scheduled_cached_reqs.resumed_req_ids
            or rows_of.keys() != self.request_ids
        ):
            return None
        self.num_left -= 1
        self.num_scheduled += 1
        longer = self._last.num_context_tokens + len(rows_of)
        self._last = self._last._replace(num_context_tokens=longer)
        return self._last

    def end(self) -> None:
        """The batch is another one, or somebody wants to decide."""
        self.num_left, self._last = 0, None

    def told(self) -> None:
        """Everything has been heard of; the next step is decided about."""
        self.outcomes, self.num_scheduled = [], 0
        self.end()
