"""Worlds without a model: requests, acceptance and times are drawn.

Assumptions: as many requests wait as are needed; lengths of answers are geometric;
noise multiplies a step's time (log-normal, with a slow part that neighbouring steps
share) and some steps take ten times as long. What a step is: see `trace_engine`.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.control.synthetic_acceptance import AcceptanceLaw
from benchmarks.control.trace_engine import DrawnEngine
from benchmarks.control.trace_world import Array, CostCurve
from vllm_mtp.config import DEFAULT_DRAFT_LENGTH

FLICKER_STEPS = np.array([3.0, 30.0, 300.0, 3000.0])


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
    max_draft_length: int = DEFAULT_DRAFT_LENGTH
    prompt_tokens: int = 512
    """Mean context length of a request that begins."""
    mean_tokens: int = 400
    """Mean length of an answer."""
    sampled_share: float = 0.0
    """Of requests with temperature."""
    constrained_share: float = 0.0
    """Of requests that follow a grammar."""
    constrained_loss: float = 0.0
    """Log-odds that these accept less."""
    noise: float = 0.04
    """Standard deviation of the log of a step's time, independent part."""
    slow_noise: float = 0.02
    """The same of the part that neighbouring steps share."""
    flicker: float = 0.0
    """The same of each of four parts that last about 3, 30, 300 and 3000 steps: a
    machine shared with others, on which no average settles."""
    spike_share: float = 0.005
    """Of steps that take ten times as long."""
    admission_steps: int = 8
    """Requests that wait are let in every so many steps."""
    prefill_token_s: float = 2e-6
    outcome_delay_steps: int = 0
    sees_shadow_drafts: bool = False
    """Drafts come back to the scheduler (sync scheduling)."""
    is_stationary: bool = True
    """Nothing but the requests themselves changes with time."""

    @property
    def change_steps(self) -> tuple[int, ...]:
        """Steps at which acceptance or load changes abruptly."""
        return tuple(sorted({first for first, _ in (*self.law.phases, *self.load)}))

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

    def start(self, seed: int) -> "SyntheticEngine":
        """An engine at its first step."""
        return SyntheticEngine(self, seed)


class SyntheticEngine(DrawnEngine):
    """Runs a synthetic world step by step."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        self.world = world
        self._num_admitted = 0
        self._slow = 0.0
        self._flicker = np.zeros(len(FLICKER_STEPS))

    def _admit_and_stop(self) -> None:
        running, wanted = self._running, self.world.concurrency(self.step_number)
        if wanted < len(running):
            running.keep(np.arange(len(running)) < wanted)
        is_due = self.step_number % self.world.admission_steps == 0
        if (is_due or not running.ids) and wanted > len(running):
            self._admit(wanted - len(running))

    def _admit(self, count: int) -> None:
        world, draw = self.world, self._random
        new_ids = [f"r{self._num_admitted + i}" for i in range(count)]
        self._num_admitted += count
        prompts = np.maximum(draw.lognormal(0, 0.5, count) * world.prompt_tokens, 8)
        sampled = draw.random(count) < world.sampled_share
        shifts = draw.normal(0, 1, count) * world.law.spread
        constrained = np.zeros(count, dtype=bool)
        if world.constrained_share:
            constrained = draw.random(count) < world.constrained_share
        columns: dict[str, Array] = {
            "contexts": np.floor(prompts),
            "left": draw.geometric(1 / world.mean_tokens, count).astype(float),
            "kinds": draw.random(count),
            "shifts": shifts
            - world.law.sampled_loss * sampled
            - world.constrained_loss * constrained,
            "moods": draw.choice((-1.0, 1.0), count),
            "is_sampled": sampled,
            "is_constrained": constrained,
        }
        self._let_in(new_ids, columns)

    def _conditional(self) -> Array:
        running, law = self._running, self.world.law
        return law.conditional(
            self.step_number,
            self.world.max_draft_length,
            running["kinds"],
            running["shifts"] + law.bursts * running["moods"],
            running["contexts"],
        )

    def _time_factor(self) -> float:
        world, draw = self.world, self._random
        self._slow = 0.98 * self._slow + draw.normal(0, world.slow_noise) * 0.2
        noise = np.exp(self._slow + self._flickering() + draw.normal(0, world.noise))
        spike = 10.0 if draw.random() < world.spike_share else 1.0
        return float(noise * spike)

    def _flickering(self) -> float:
        if not self.world.flicker:
            return 0.0
        keep = np.exp(-1.0 / FLICKER_STEPS)
        pushes = self._random.normal(0, self.world.flicker, len(FLICKER_STEPS))
        self._flicker = keep * self._flicker + np.sqrt(1.0 - keep**2) * pushes
        return float(self._flicker.sum())

    def _end_step(self) -> None:
        law, running = self.world.law, self._running
        if law.bursts:
            flips = self._random.random(len(running)) < 1 / law.burst_steps
            running["moods"] = np.where(flips, -running["moods"], running["moods"])
