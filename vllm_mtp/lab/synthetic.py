"""A decode loop without a model: requests, acceptance and times are drawn.

One step, in the order in which a scheduler meets it::

    admit      waiting requests, every `admission_steps`; their prefill is part of the
               step, and its time is `prefill_token_s` for each token
    decide     the controller sees every request that will decode in the next step
    verify     draft tokens of the decision *before*: accepted ones are drawn
    draft      as deep as the decision of *this* step says
    outcome    handed to the controller `outcome_delay_steps` later (async scheduling)

Assumptions: as many requests wait as are needed; lengths of answers are geometric;
noise multiplies a step's time (log-normal, with a slow part that neighbouring steps
share) and some steps take ten times as long. When drafting resumes after a pause, the
MTP layers first catch up on what they missed, and the step pays for it.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_mtp.lab.synthetic_acceptance import AcceptanceLaw
from vllm_mtp.lab.synthetic_cost import CostCurve
from vllm_mtp.records import (
    DecodeRequest,
    DraftDecision,
    RequestOutcome,
    StepOutcome,
)

# [num_requests] or [num_requests, K_max]
Array = NDArray[Any]

MAX_CATCH_UP_TOKENS = 256
"""Per request: beyond that the MTP layers start without the older tokens."""


@dataclass(frozen=True)
class World:
    """A load on a machine."""

    name: str
    law: AcceptanceLaw
    cost: CostCurve
    num_requests: int = 1
    """Concurrency."""
    load: tuple[tuple[int, int], ...] = ()
    """(first step, concurrency from then on), in order."""
    max_draft_length: int = 5
    prompt_tokens: int = 512
    """Mean context length of a request that begins."""
    mean_tokens: int = 400
    """Mean length of an answer."""
    sampled_share: float = 0.0
    """Of requests with temperature."""
    noise: float = 0.04
    """Standard deviation of the log of a step's time, independent part."""
    slow_noise: float = 0.02
    """The same of the part that neighbouring steps share."""
    spike_share: float = 0.005
    """Of steps that take ten times as long."""
    admission_steps: int = 8
    prefill_token_s: float = 2e-6
    outcome_delay_steps: int = 0
    is_stationary: bool = True
    """Nothing but the requests themselves changes with time."""

    def concurrency(self, step: int) -> int:
        """Requests that may run at a step."""
        current = self.num_requests
        for first_step, num_requests in self.load:
            if step >= first_step:
                current = num_requests
        return current

    def changed(self, **changes: Any) -> "World":
        """A copy with other fields."""
        return replace(self, **changes)


class Truth(NamedTuple):
    """What an oracle knows about the requests that decode in a step."""

    request_ids: list[str]
    # [num_requests, K_max]
    survival: Array
    context: float
    """Tokens in the KV cache, summed."""

    @property
    def num_requests(self) -> int:
        return len(self.request_ids)


class _Population:
    """Running requests, column by column."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.contexts: Array = np.zeros(0)
        self.left: Array = np.zeros(0)
        self.kinds: Array = np.zeros(0)
        self.shifts: Array = np.zeros(0)
        self.moods: Array = np.zeros(0)
        self.is_sampled: Array = np.zeros(0, dtype=bool)

    def keep(self, mask: Array) -> None:
        self.ids = [i for i, kept in zip(self.ids, mask, strict=True) if kept]
        for name in ("contexts", "left", "kinds", "shifts", "moods", "is_sampled"):
            setattr(self, name, getattr(self, name)[mask])


class SyntheticEngine:
    """Runs a world step by step."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.step_number = 0
        self._random = np.random.default_rng(seed)
        self._running = _Population()
        self._num_admitted = 0
        self._new: set[str] = set()
        self._prefill_tokens = 0
        self._lengths: dict[str, int] = {}
        self._slow = 0.0
        self._missed_tokens = 0
        self._late: deque[StepOutcome] = deque()

    # -- before a step ------------------------------------------------------------

    def begin(self) -> list[DecodeRequest]:
        """Admit requests; returns those that will decode in the next step."""
        population = self._running
        self._new, self._prefill_tokens = set(), 0
        wanted = self.world.concurrency(self.step_number)
        if wanted < len(population.ids):
            population.keep(np.arange(len(population.ids)) < wanted)
        is_due = self.step_number % self.world.admission_steps == 0
        if (is_due or not population.ids) and wanted > len(population.ids):
            self._admit(wanted - len(population.ids))
        return [
            DecodeRequest(request_id, int(context), not sampled)
            for request_id, context, sampled in zip(
                population.ids,
                population.contexts,
                population.is_sampled,
                strict=True,
            )
        ]

    def _admit(self, count: int) -> None:
        world, draw, population = self.world, self._random, self._running
        new_ids = [f"r{self._num_admitted + i}" for i in range(count)]
        self._num_admitted += count
        prompts = np.maximum(draw.lognormal(0, 0.5, count) * world.prompt_tokens, 8)
        sampled = draw.random(count) < world.sampled_share
        shifts = draw.normal(0, 1, count) * world.law.spread
        columns = {
            "contexts": np.floor(prompts),
            "left": draw.geometric(1 / world.mean_tokens, count).astype(float),
            "kinds": draw.random(count),
            "shifts": shifts - world.law.sampled_loss * sampled,
            "moods": draw.choice((-1.0, 1.0), count),
            "is_sampled": sampled,
        }
        for name, values in columns.items():
            old = getattr(population, name)
            setattr(population, name, np.concatenate([old, values]))
        population.ids += new_ids
        self._new = set(new_ids)
        self._prefill_tokens = int(columns["contexts"].sum())

    def truth(self) -> Truth:
        """The requests that decode in this step: those that began before it."""
        old = np.array([i not in self._new for i in self._running.ids], dtype=bool)
        conditional = self._conditional()[old]
        ids = [i for i in self._running.ids if i not in self._new]
        context = float(self._running.contexts[old].sum())
        return Truth(ids, np.cumprod(conditional, axis=1), context)

    def _conditional(self) -> Array:
        population, world = self._running, self.world
        return world.law.conditional(
            self.step_number,
            world.max_draft_length,
            population.kinds,
            population.shifts + world.law.bursts * population.moods,
            population.contexts,
        )

    # -- the step -----------------------------------------------------------------

    def step(self, decision: DraftDecision) -> tuple[StepOutcome, list[StepOutcome]]:
        """Run a step whose drafts `decision` ordered.

        Returns:
            The step's outcome, and the outcomes that the controller hears of now.
        """
        population = self._running
        lengths = np.array([self._lengths.get(i, 0) for i in population.ids], dtype=int)
        accepted = self._draw_accepted(lengths)
        is_old = np.array([i not in self._new for i in population.ids], dtype=bool)
        num_old = int(is_old.sum())
        rows = int(num_old + lengths.sum())
        context = float(population.contexts[is_old].sum())
        outcome = StepOutcome(
            requests=tuple(
                RequestOutcome(request_id, int(k), int(a))
                for request_id, k, a in zip(
                    population.ids, lengths, accepted, strict=True
                )
                if k
            ),
            num_requests=len(population.ids),
            num_scheduled_tokens=rows + self._prefill_tokens,
            step_time_s=self._time_s(decision.draft_depth, lengths[is_old], context),
            draft_depth=decision.draft_depth,
            num_decode_requests=num_old,
            num_prefill_tokens=self._prefill_tokens,
            num_context_tokens=int(context),
        )
        self._commit(accepted + 1, decision)
        self._late.append(outcome)
        heard = []
        while len(self._late) > self.world.outcome_delay_steps:
            heard.append(self._late.popleft())
        return outcome, heard

    def _draw_accepted(self, lengths: Array) -> Array:
        conditional = self._conditional()
        passed = self._random.random(conditional.shape) < conditional
        passed &= np.arange(self.world.max_draft_length) < lengths[:, None]
        result: Array = np.cumprod(passed, axis=1).sum(axis=1)
        return result

    def _time_s(self, depth: int, lengths: Array, context: float) -> float:
        seconds = self._prefill_tokens * self.world.prefill_token_s
        if len(lengths):
            rows = np.array([len(lengths) + lengths.sum()])
            is_uniform = bool((lengths == lengths[0]).all())
            verify = self.world.cost.verify_s(len(lengths), rows, context, is_uniform)
            seconds += float(verify[0])
        num_drafting = len(self._running.ids)
        seconds += self.world.cost.draft_s(num_drafting, depth, context)
        seconds += self.resume_s(depth)
        world, draw = self.world, self._random
        self._slow = 0.98 * self._slow + draw.normal(0, world.slow_noise) * 0.2
        noise = np.exp(self._slow + draw.normal(0, world.noise))
        spike = 10.0 if draw.random() < world.spike_share else 1.0
        return float(seconds * noise * spike)

    def resume_s(self, depth: int) -> float:
        """Seconds of the catch-up pass, if this step drafts after a pause."""
        if not depth or not self._missed_tokens:
            return 0.0
        return self.world.cost.catch_up_s(self._missed_tokens)

    def _commit(self, tokens: Array, decision: DraftDecision) -> None:
        population, law = self._running, self.world.law
        population.contexts = population.contexts + tokens
        population.left = population.left - tokens
        population.keep(population.left > 0)
        if law.bursts:
            flips = self._random.random(len(population.ids)) < 1 / law.burst_steps
            population.moods = np.where(flips, -population.moods, population.moods)
        if decision.draft_depth:
            self._missed_tokens = 0
        else:
            limit = MAX_CATCH_UP_TOKENS * max(len(population.ids), 1)
            missed = self._missed_tokens + int(tokens.sum())
            self._missed_tokens = min(missed, limit)
        self._lengths = dict(decision.num_draft_tokens)
        self.step_number += 1
