"""A recording as a world: any controller can be run over it.

What a step costs comes from `trace_cost_fit`, what is accepted from
`trace_measured_acceptance`; both are estimates, and the oracle knows them. So a replay
says how a controller does in a world *like* the recorded one, not what it would have
done in that hour. Noise is the recorded one: a stretch of what times were over what the
estimate says, from a random beginning.

Requests begin with the context that they had and end after as many tokens as they had.
A step of the replay commits other numbers of tokens than the recorded one, so arrivals
cannot keep their step: a request begins, in the recorded order, as soon as fewer run
than ran when it appeared. That is exact for a closed loop (a fixed number of clients)
and keeps the recorded load otherwise. When all have been served, the recording begins
anew. Pinned draft lengths are left out: the oracle's is a free choice.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.control.trace_cost_fit import fit_cost
from benchmarks.control.trace_engine import DrawnEngine
from benchmarks.control.trace_file import (
    Trace,
    TracedDecision,
    TracedOutcome,
    read_trace,
)
from benchmarks.control.trace_measured_acceptance import (
    KNOT_TOKENS,
    RequestHistory,
    acceptance_tables,
)
from benchmarks.control.trace_measured_cost import MeasuredCost
from benchmarks.control.trace_world import Array
from vllm_mtp.config import ConfigError

_DELAYS = (0, 1, 2)
"""Of outcomes, in steps, that are told apart."""
_DELAY_SAMPLE = 1500
"""Outcomes that they are told apart by."""


class RecordedRequest(NamedTuple):
    """A request as it was recorded."""

    num_context_tokens: int
    """When it was first seen."""
    num_tokens: int
    """From then to its end, to within a few draft tokens."""
    is_greedy: bool
    is_constrained: bool
    num_running: int
    """Requests that ran when it appeared, itself included."""
    # [num_knots, K_max] conditional acceptance, a row for each KNOT_TOKENS tokens
    acceptance: Array


@dataclass(frozen=True)
class RecordedWorld:
    """A recorded load on the machine that it was recorded on."""

    name: str
    max_draft_length: int
    cost: MeasuredCost
    requests: tuple[RecordedRequest, ...]
    # [num_steps] time over expected time
    noise: Array
    prefill_token_s: float
    outcome_delay_steps: int
    num_recorded_steps: int
    is_stationary: bool = False

    @property
    def sees_shadow_drafts(self) -> bool:
        """Only a sync scheduler hears of a step before it schedules the next."""
        return self.outcome_delay_steps == 0

    @property
    def change_steps(self) -> tuple[int, ...]:
        """None are known."""
        return ()

    def start(self, seed: int) -> "RecordedEngine":
        """An engine at its first step."""
        return RecordedEngine(self, seed)


class RecordedEngine(DrawnEngine):
    """Runs a recorded world step by step."""

    def __init__(self, world: RecordedWorld, seed: int) -> None:
        super().__init__(world, seed)
        self.world = world
        tables = [request.acceptance for request in world.requests]
        sizes = np.array([len(table) for table in tables])
        self._acceptance = np.concatenate(tables)
        self._first_row = np.cumsum(sizes) - sizes
        self._last_row = np.cumsum(sizes) - 1
        self._num_admitted = 0
        self._noise_at = int(self._random.integers(len(world.noise)))

    def _admit_and_stop(self) -> None:
        requests, running = self.world.requests, self._running
        numbers: list[int] = []
        while True:
            number = self._num_admitted % len(requests)
            num_running = len(running) + len(numbers)
            if num_running and num_running >= requests[number].num_running:
                break
            numbers.append(number)
            self._num_admitted += 1
        if not numbers:
            return
        begun = [requests[number] for number in numbers]
        first = self._num_admitted - len(numbers)
        left = np.array([float(r.num_tokens) for r in begun])
        self._let_in(
            [f"r{first + i}" for i in range(len(numbers))],
            {
                "contexts": np.array([float(r.num_context_tokens) for r in begun]),
                "left": left,
                "lengths": left,
                "is_sampled": np.array([not r.is_greedy for r in begun]),
                "is_constrained": np.array([r.is_constrained for r in begun]),
                "numbers": np.array(numbers),
            },
        )

    def _conditional(self) -> Array:
        running = self._running
        numbers = running["numbers"].astype(int)
        done = (running["lengths"] - running["left"]) // KNOT_TOKENS
        rows = self._first_row[numbers] + done.astype(int)
        found: Array = self._acceptance[np.minimum(rows, self._last_row[numbers])]
        return found

    def _time_factor(self) -> float:
        self._noise_at = (self._noise_at + 1) % len(self.world.noise)
        return float(self.world.noise[self._noise_at])


def load_world(path: Path) -> RecordedWorld:
    """A world from a trace; its name is the file's.

    Raises:
        ConfigError: The file is no trace, or too little for an estimate.
    """
    trace = read_trace(path)
    try:
        return recorded_world(trace)
    except ConfigError as error:
        raise ConfigError(f"trace {str(path)!r} cannot be replayed: {error}") from None


def recorded_world(trace: Trace) -> RecordedWorld:
    """A world from a trace.

    Raises:
        ConfigError: Too little was recorded for an estimate.
    """
    outcomes = [traced.outcome for traced in trace.outcomes]
    fitted = fit_cost(outcomes, trace.max_draft_length)
    seen = _Seen(trace)
    if not any(history.drafted for history in seen.histories.values()):
        raise ConfigError("no draft token was verified in it.")
    tables = acceptance_tables(
        list(seen.histories.values()), len(outcomes), trace.max_draft_length
    )
    requests = tuple(
        RecordedRequest(
            seen.first_context[i],
            seen.num_tokens(i),
            seen.histories[i].is_greedy,
            seen.histories[i].is_constrained,
            seen.num_running[i],
            table,
        )
        for i, table in zip(seen.histories, tables, strict=True)
    )
    return RecordedWorld(
        trace.path.stem,
        trace.max_draft_length,
        fitted.cost,
        requests,
        fitted.noise,
        fitted.prefill_token_s,
        outcome_delay(trace.decisions, trace.outcomes),
        len(outcomes),
    )


class _Seen:
    """The requests of a trace, in the order of their appearance."""

    def __init__(self, trace: Trace) -> None:
        self.histories: dict[str, RequestHistory] = {}
        self.first_context: dict[str, int] = {}
        self.num_running: dict[str, int] = {}
        self._last_context: dict[str, int] = {}
        self._last_accepted: dict[str, int] = {}
        num_decisions = 0
        for step, traced in enumerate(trace.outcomes):
            for decision in trace.decisions[
                num_decisions : traced.num_decisions_before
            ]:
                self._see(decision, step)
            num_decisions = traced.num_decisions_before
            self._learn(traced, step)

    def _see(self, traced: TracedDecision, step: int) -> None:
        for request in traced.requests:
            request_id, context = request.request_id, request.num_context_tokens
            if request_id not in self.histories:
                self.histories[request_id] = RequestHistory(
                    request.is_greedy, step, request.is_constrained
                )
                self.first_context[request_id] = context
                self.num_running[request_id] = len(traced.requests)
            self._last_context[request_id] = context

    def _learn(self, traced: TracedOutcome, step: int) -> None:
        for request_id, drafted, accepted, *_ in traced.outcome.requests:
            history = self.histories.get(request_id)
            if history is None or not drafted:
                continue
            history.places.append(
                self._last_context[request_id] - self.first_context[request_id]
            )
            history.steps.append(step)
            history.drafted.append(drafted)
            history.accepted.append(accepted)
            self._last_accepted[request_id] = accepted

    def num_tokens(self, request_id: str) -> int:
        grown = self._last_context[request_id] - self.first_context[request_id]
        return max(grown + self._last_accepted.get(request_id, 0) + 1, 1)


def outcome_delay(
    decisions: Sequence[TracedDecision], outcomes: Sequence[TracedOutcome]
) -> int:
    """Steps by which outcomes arrived late: 0, or 1 and more under async scheduling.

    What a step verified is what the decision before it chose; the delay is the one
    under which the two agree most often.
    """
    agreeing: Counter[int] = Counter()
    for outcome, num_before in outcomes[:_DELAY_SAMPLE]:
        for delay in _DELAYS:
            index = num_before - 2 - delay
            if index < 0:
                continue
            chosen = decisions[index].decision.num_draft_tokens
            agreeing[delay] += sum(
                chosen.get(request_id) == drafted
                for request_id, drafted, *_ in outcome.requests
            )
    return max(_DELAYS, key=lambda delay: agreeing[delay])
