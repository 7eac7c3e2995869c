"""From what the scheduler scheduled to what the controller hears of it.

Steps overlap under async scheduling, so what is known when a step is scheduled waits
in a queue until the step's output comes back.
"""

import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from vllm_mtp.control.catching_up import caught_up_now
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
    is_greedy: bool
    """No request is sampled."""


class CaughtUp(NamedTuple):
    """What the MTP layers catch up on before they draft."""

    num_tokens: int
    still_waiting: frozenset[str]
    """Requests that cannot be drafted for yet."""


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
        self._under_way: deque[tuple[ScheduledStep | None, float]] = deque()
        """None for steps that rest."""
        self._requests: list[RequestOutcome] = []
        self._compared: list[RequestOutcome] = []
        self._last_output_at_s = 0.0
        self._last: ScheduledStep | None = None
        self._scheduling_since_s: float | None = None
        self._learning_s = 0.0
        """Since the last output."""

    def scheduling(self) -> None:
        """Scheduling begins; what deciding takes is part of the step."""
        self._scheduling_since_s = time.monotonic()

    def begin(self, step: ScheduledStep) -> None:
        self._under_way.append((step, self._begun_at_s()))

    def _begun_at_s(self) -> float:
        since_s, self._scheduling_since_s = self._scheduling_since_s, None
        return since_s or time.monotonic()

    def begin_resting(self) -> None:
        """As `begin`, of a step whose time is all that will be known of it."""
        self._under_way.append((None, self._begun_at_s()))

    @property
    def next_is_resting(self) -> bool:
        """The step whose output comes next is one of those."""
        return bool(self._under_way) and self._under_way[0][0] is None

    def take_resting(self) -> float:
        """As `take`, of such a step: the seconds that it took."""
        _, began_at_s = self._under_way.popleft()
        return self._step_time_s(began_at_s)

    def _step_time_s(self, began_at_s: float) -> float:
        """Of the step whose output has just come."""
        now_s = time.monotonic()
        step_time_s = now_s - max(began_at_s, self._last_output_at_s)
        if began_at_s >= self._last_output_at_s:  # else it lies between two outputs
            step_time_s += self._learning_s
        self._learning_s = 0.0
        self._last_output_at_s = now_s
        return step_time_s

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Within, a controller learns, while nothing else can go on.

        Of small models that is a hundredth of a step with drafts, and next to nothing
        of one without: left out, drafting would seem cheaper than it is. It counts as
        time of the step that comes next, most often one of the same kind.
        """
        since_s = time.monotonic()
        try:
            yield
        finally:
            self._learning_s += time.monotonic() - since_s

    def add(self, outcome: RequestOutcome) -> None:
        """A request's drafts were verified in the step whose output is here."""
        self._requests.append(outcome)

    def add_compared(self, outcome: RequestOutcome) -> None:
        """A request's draft was not verified, but is it what the target sampled?"""
        self._compared.append(outcome)

    def take(self) -> StepOutcome:
        """The oldest step's outcome; its output is here."""
        step, began_at_s = self._under_way.popleft()
        assert step is not None, "it rested"
        step_time_s = self._step_time_s(began_at_s)
        drafting = (self._last or step) if self._drafts_after_output else step
        self._last = step
        requests, self._requests = tuple(self._requests), []
        compared, self._compared = tuple(self._compared), []
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
            is_greedy=step.is_greedy,
            compared=compared,
        )


class UnseenCounts:
    """How many tokens of each request wait for the MTP layers; the worker has them."""

    def __init__(self) -> None:
        self._num_rests = 0
        """Steps without the MTP layers so far."""
        self._seen_until: dict[str, int] = {}
        """By request: that count when it had seen everything."""

    def of(self, request_id: str) -> int:
        """Tokens that wait for a request."""
        if not self._seen_until:
            return 0
        return self._num_rests - self._seen_until.get(request_id, self._num_rests)

    def rest(self, request_ids: Iterable[str], num_steps: int = 1) -> None:
        """Steps without the MTP layers: a token more of each request waits for each."""
        for request_id in request_ids:
            self._seen_until.setdefault(request_id, self._num_rests)
        self._num_rests += num_steps

    def catch_up(self, request_ids: Collection[str]) -> CaughtUp:
        """A step that drafts: some of its requests are caught up before it does."""
        if not self._seen_until:
            return CaughtUp(0, frozenset())
        waiting = {i: self.of(i) for i in request_ids}
        chosen = caught_up_now(waiting)
        for request_id in chosen:
            self._seen_until.pop(request_id, None)
        return CaughtUp(
            sum(waiting[i] for i in chosen),
            frozenset(i for i in request_ids if i in self._seen_until),
        )

    def forget(self, request_id: str) -> None:
        self._seen_until.pop(request_id, None)
