"""Steps that go like the one before and need no decision.

While drafting is off nothing depends on a step but its time. What is written down of it
waits for a few more: between two passes of the target the processor's caches hold
nothing of ours, so that doing little in each step costs a quarter of a millisecond,
and doing it for many of them at once hardly more.
"""

from collections.abc import Sequence
from typing import Any

from vllm_mtp.integration.scheduler.scheduled_steps import ScheduledStep
from vllm_mtp.integration.worker.drafting_disabled import repeats
from vllm_mtp.records import StepOutcome

MAX_STEPS = 8
"""That wait to be told."""


class RestingSteps:
    """Steps of one batch that nobody has heard of yet."""

    def __init__(self) -> None:
        """Nothing rests."""
        self.seconds: list[float] = []
        """What those took whose output is here."""
        self.num_scheduled = 0
        self.request_ids: list[str] = []
        """The batch: all decode, one row each, and sample a token."""
        self.num_left = 0
        """Steps that need no decision, as far as the controller is concerned."""
        self._decided: ScheduledStep | None = None
        """The step before them."""

    @property
    def are_under_way(self) -> bool:
        """Outputs of some of them are not here yet."""
        return len(self.seconds) < self.num_scheduled

    def ended(self, seconds: float) -> None:
        """The output of one is here.

        Where steps overlap its batch may be over by now and all be told of it: then its
        time is not missed.
        """
        if self.are_under_way:
            self.seconds.append(seconds)

    def may_begin(self, request_ids: Sequence[str], step: ScheduledStep) -> None:
        """The next steps may be like this one.

        Args:
            request_ids: In the scheduler's order.
            step: What is known of it.
        """
        self.request_ids, self._decided, self.num_left = [*request_ids], step, 0

    def begin(self, num_steps: int) -> None:
        """Nothing will be drafted for a batch like the last one.

        Args:
            num_steps: For how long, the step that is being scheduled included.
        """
        # One that is decided lies between these and the next ones.
        may_begin = self._decided is not None and not self.num_scheduled
        self.num_left = min(num_steps, MAX_STEPS) if may_begin else 0

    def goes_on(self, scheduler_output: Any) -> bool:
        """Whether the step just scheduled is one of them, or needs a decision."""
        if not self.num_left or not repeats(scheduler_output, self.request_ids):
            return False
        self.num_left -= 1
        self.num_scheduled += 1
        return True

    def end(self) -> None:
        """The batch is another one, or somebody wants to decide."""
        self.num_left, self._decided = 0, None

    def outcomes(self) -> list[StepOutcome]:
        """Of those whose output is here, in their order."""
        if not self.seconds:
            return []
        assert self._decided is not None
        context, num_requests = self._decided.num_context_tokens, len(self.request_ids)
        return [
            StepOutcome(
                requests=(),
                num_requests=num_requests,
                num_scheduled_tokens=num_requests,
                step_time_s=seconds,
                num_decode_requests=num_requests,
                num_context_tokens=context + number * num_requests,
                is_greedy=self._decided.is_greedy,
            )
            for number, seconds in enumerate(self.seconds, start=1)
        ]

    def told(self) -> None:
        """Everything has been heard of; the next step is decided about."""
        self.seconds, self.num_scheduled = [], 0
        self.end()
