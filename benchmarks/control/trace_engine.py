"""A decode loop without a model, for every kind of world.

What differs between worlds (who arrives, what is accepted, how a step's time scatters)
is left to subclasses; what a step is and when a controller hears of it is said here::

    admit      waiting requests; their prefill is part of the step, and its time is
               `prefill_token_s` for each token
    decide     the controller sees every request that will decode in the next step
    verify     draft tokens of the decision *before*: accepted ones are drawn
    draft      as deep as the decision of *this* step says
    outcome    handed to the controller `outcome_delay_steps` later (async scheduling)

When drafting resumes after a pause, the MTP layers first catch up on what they missed,
and the step pays for it.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from benchmarks.control.trace_world import Array, CostCurve, Truth
from vllm_mtp.control.kv_backfill import backfilled_now
from vllm_mtp.records import (
    DecodeRequest,
    DraftDecision,
    RequestOutcome,
    StepOutcome,
)


class EngineWorld(Protocol):
    """What the loop asks its world."""

    @property
    def cost(self) -> CostCurve: ...

    @property
    def max_draft_length(self) -> int: ...

    @property
    def prefill_token_s(self) -> float: ...

    @property
    def outcome_delay_steps(self) -> int: ...

    @property
    def sees_shadow_drafts(self) -> bool: ...


class Population:
    """Running requests, column by column.

    Every world has ``contexts`` (tokens in the KV cache), ``left`` (tokens until the
    request ends), ``is_sampled`` and ``is_constrained``.
    """

    def __init__(self) -> None:
        self.ids: list[str] = []
        self._columns: dict[str, Array] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, name: str) -> Array:
        column = self._columns.get(name)
        return np.zeros(0) if column is None else column

    def __setitem__(self, name: str, values: Array) -> None:
        assert len(values) == len(self.ids), (name, len(values), len(self.ids))
        self._columns[name] = values

    def append(self, ids: list[str], columns: Mapping[str, Array]) -> None:
        """Add requests; every column must be named."""
        self._columns = {
            name: np.concatenate([self._columns[name], values])
            if self._columns
            else np.asarray(values)
            for name, values in columns.items()
        }
        self.ids += ids

    def keep(self, mask: Array) -> None:
        self.ids = [i for i, kept in zip(self.ids, mask, strict=True) if kept]
        self._columns = {name: v[mask] for name, v in self._columns.items()}


class DrawnEngine(ABC):
    """Runs a world step by step."""

    def __init__(self, world: EngineWorld, seed: int) -> None:
        self.step_number = 0
        self._settings = world
        self._random = np.random.default_rng(seed)
        self._running = Population()
        self._new: set[str] = set()
        self._prefill_tokens = 0
        self._lengths: dict[str, int] = {}
        self._drafted: frozenset[str] = frozenset()
        """Requests for which the step before drafted."""
        self._unseen: dict[str, int] = {}
        """Tokens that the MTP layers have missed, by running request."""
        self._late: deque[StepOutcome] = deque()

    @abstractmethod
    def _admit_and_stop(self) -> None:
        """Let requests in (`_let_in`) or throw some out."""

    @abstractmethod
    def _conditional(self) -> Array:
        """True conditional acceptance now, [num running requests, K_max]."""

    @abstractmethod
    def _time_factor(self) -> float:
        """Noise: what this step's time is multiplied with."""

    def _end_step(self) -> None:  # noqa: B027 - most worlds have nothing to add
        """What else changes between two steps."""

    # -- before a step ------------------------------------------------------------

    def begin(self) -> list[DecodeRequest]:
        """Admit requests; returns those that will decode in the next step."""
        self._new, self._prefill_tokens = set(), 0
        self._admit_and_stop()
        population = self._running
        return [
            DecodeRequest(
                request_id,
                int(context),
                not sampled,
                num_pending_tokens=self._unseen.get(request_id, 0),
                is_constrained=bool(constrained),
            )
            for request_id, context, sampled, constrained in zip(
                population.ids,
                population["contexts"],
                population["is_sampled"],
                population["is_constrained"],
                strict=True,
            )
        ]

    def _let_in(self, ids: list[str], columns: Mapping[str, Array]) -> None:
        """Requests whose prompts are prefilled in this step."""
        self._running.append(ids, columns)
        self._new.update(ids)
        self._prefill_tokens += int(columns["contexts"].sum())

    def _is_old(self) -> Array:
        return np.array([i not in self._new for i in self._running.ids], dtype=bool)

    def truth(self) -> Truth:
        """The requests that decode in this step: those that began before it."""
        old = self._is_old()
        conditional = self._conditional()[old]
        ids = [i for i in self._running.ids if i not in self._new]
        context = float(self._running["contexts"][old].sum())
        return Truth(ids, np.cumprod(conditional, axis=1), context)

    def resume_s(self, depth: int) -> float:
        """Seconds of the catch-up pass, if this step drafts after a pause."""
        num_tokens = self._num_caught_up(self._caught_up(depth))
        return self._settings.cost.catch_up_s(num_tokens) if num_tokens else 0.0

    def _caught_up(self, depth: int) -> list[str]:
        """Requests that get drafts in this step, after what the MTP layers missed."""
        if not depth:
            return []
        return backfilled_now({i: self._unseen.get(i, 0) for i in self._running.ids})

    def _num_caught_up(self, request_ids: list[str]) -> int:
        return sum(self._unseen.get(request_id, 0) for request_id in request_ids)

    # -- the step -----------------------------------------------------------------

    def step(self, decision: DraftDecision) -> tuple[StepOutcome, list[StepOutcome]]:
        """Run a step whose drafts `decision` ordered.

        Returns:
            The step's outcome, and the outcomes that the controller hears of now.
        """
        population = self._running
        lengths = np.array([self._lengths.get(i, 0) for i in population.ids], dtype=int)
        accepted = self._draw_accepted(lengths)
        is_old = self._is_old()
        num_old = int(is_old.sum())
        context = float(population["contexts"][is_old].sum())
        caught_up = self._caught_up(decision.draft_depth)
        outcome = StepOutcome(
            requests=tuple(
                RequestOutcome(request_id, int(k), int(a))
                for request_id, k, a in zip(
                    population.ids, lengths, accepted, strict=True
                )
                if k
            ),
            num_requests=len(population),
            num_scheduled_tokens=num_old + int(lengths.sum()) + self._prefill_tokens,
            step_time_s=self._time_s(decision.draft_depth, lengths[is_old], context),
            draft_depth=decision.draft_depth,
            num_decode_requests=num_old,
            num_prefill_tokens=self._prefill_tokens,
            num_context_tokens=int(context),
            num_backfill_tokens=self._num_caught_up(caught_up),
            is_greedy=not population["is_sampled"].any(),
            shadow_drafts=self._compare(lengths),
        )
        rests = not (decision.draft_depth or lengths.any() or self._prefill_tokens)
        self._commit(accepted + 1, rests, caught_up)
        drafted = decision.num_draft_tokens.items()
        self._lengths = {i: k if i in self._drafted else 0 for i, k in drafted}
        return outcome, self._heard(outcome)

    def _draw_accepted(self, lengths: Array) -> Array:
        conditional = self._conditional()
        passed = self._random.random(conditional.shape) < conditional
        passed &= np.arange(self._settings.max_draft_length) < lengths[:, None]
        result: Array = np.cumprod(passed, axis=1).sum(axis=1)
        return result

    def _compare(self, lengths: Array) -> tuple[RequestOutcome, ...]:
        """Drafts of which nothing was verified, beside what the target sampled."""
        if not (self._settings.sees_shadow_drafts and self._drafted):
            return ()
        same = self._random.random(len(lengths)) < self._conditional()[:, 0]
        return tuple(
            RequestOutcome(request_id, 1, int(accepted))
            for request_id, k, accepted in zip(
                self._running.ids, lengths, same, strict=True
            )
            if k == 0 and request_id in self._drafted
        )

    def _time_s(self, depth: int, lengths: Array, context: float) -> float:
        cost = self._settings.cost
        seconds = self._prefill_tokens * self._settings.prefill_token_s
        if len(lengths):
            rows = np.array([len(lengths) + lengths.sum()])
            is_uniform = bool((lengths == lengths[0]).all())
            seconds += float(cost.verify_s(len(lengths), rows, context, is_uniform)[0])
        # The MTP layers pass over verified rows whether or not they draft.
        passes = depth or int(lengths.any())
        seconds += cost.draft_s(len(self._running), passes, context)
        seconds += self.resume_s(depth)
        return float(seconds * self._time_factor())

    def _commit(self, tokens: Array, rests: bool, caught_up: list[str]) -> None:
        population = self._running
        population["contexts"] = population["contexts"] + tokens
        population["left"] = population["left"] - tokens
        population.keep(population["left"] > 0)
        self._end_step()
        self._drafted = frozenset(caught_up)
        self._unseen = {
            request_id: self._unseen.get(request_id, 0) + rests
            for request_id in population.ids
            if request_id not in self._drafted
        }
        self.step_number += 1

    def _heard(self, outcome: StepOutcome) -> list[StepOutcome]:
        self._late.append(outcome)
        heard = []
        while len(self._late) > self._settings.outcome_delay_steps:
            heard.append(self._late.popleft())
        return heard
