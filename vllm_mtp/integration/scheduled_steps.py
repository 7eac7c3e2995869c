"""From what the scheduler scheduled to what the controller hears of it.

Steps overlap under async scheduling, so what is known when a step is scheduled waits
in a queue until the step's output comes back.
"""

import time
from collections import deque
from typing import NamedTuple

from vllm_mtp.integration import pause
from vllm_mtp.records import RequestOutcome, StepOutcome


class ScheduledStep(NamedTuple):
    """What is known of a step before it runs."""

    num_requests: int
    num_rows: int
    num_decode_requests: int
    num_prefill_tokens: int
    num_context_tokens: int
    draft_depth: int
    num_catch_up_tokens: int


class StepOutcomes:
    """Times steps and puts their outcomes together."""

    def __init__(self, drafts_after_output: bool) -> None:
        """Begin with nothing on the way.

        Args:
            drafts_after_output: A step's output is handed over before its drafts are
                made (async scheduling on a GPU), so that the time between two outputs
                contains the draft steps of the step before.
        """
        self._drafts_after_output = drafts_after_output
        self._under_way: deque[tuple[ScheduledStep, float]] = deque()
        self._requests: list[RequestOutcome] = []
        self._last_output_at_s = 0.0
        self._last: ScheduledStep | None = None

    def begin(self, step: ScheduledStep) -> None:
        self._under_way.append((step, time.monotonic()))

    def add(self, outcome: RequestOutcome) -> None:
        """A request's drafts were verified in the step whose output is here."""
        self._requests.append(outcome)

    def take(self) -> StepOutcome:
        """The oldest step's outcome; its output is here."""
        step, began_at_s = self._under_way.popleft()
        now_s = time.monotonic()
        step_time_s = now_s - max(began_at_s, self._last_output_at_s)
        self._last_output_at_s = now_s
        drafting = (self._last or step) if self._drafts_after_output else step
        self._last = step
        requests, self._requests = tuple(self._requests), []
        return StepOutcome(
            requests=requests,
            num_requests=step.num_requests,
            num_scheduled_tokens=step.num_rows,
            step_time_s=step_time_s,
            draft_depth=drafting.draft_depth,
            num_decode_requests=step.num_decode_requests,
            num_prefill_tokens=step.num_prefill_tokens,
            num_context_tokens=step.num_context_tokens,
            num_catch_up_tokens=drafting.num_catch_up_tokens,
        )


class UnseenCounts:
    """How many tokens of each request wait for the MTP layers; the worker has them."""

    def __init__(self) -> None:
        self._rests = 0
        """Steps without the MTP layers so far."""
        self._seen_until: dict[str, int] = {}
        """By request: that count when it had seen everything."""

    def step(
        self,
        num_rows_of: dict[str, int],
        num_draft_tokens: int,
        draft_depth: int,
    ) -> int:
        """Count a step; returns the tokens that are caught up in it.

        Args:
            num_rows_of: Rows of each request of the step.
            num_draft_tokens: Draft tokens that it verifies.
            draft_depth: Draft steps at its end.
        """
        num_rows = sum(num_rows_of.values())
        if pause.mtp_layers_rest(
            draft_depth, len(num_rows_of), num_rows, num_draft_tokens
        ):
            for request_id in num_rows_of:
                self._seen_until.setdefault(request_id, self._rests)
            self._rests += 1
            return 0
        if not draft_depth or not self._seen_until:
            return 0
        seen = (self._seen_until.pop(i, self._rests) for i in num_rows_of)
        return sum(self._rests - until for until in seen)

    def forget(self, request_id: str) -> None:
        self._seen_until.pop(request_id, None)
