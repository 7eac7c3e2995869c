"""Worlds drawn at random, so that no rule of a controller is fitted to one machine.

A seed fixes a world: its cost, its acceptance, its load and what changes on the way.
Ranges are those of the machines and models that vLLM serves MTP on, wide enough that a
further draft token is nearly free in some worlds and hopeless in others. Even seeds are
for tuning, odd ones are held out: see `tuning_worlds` and `held_out_worlds`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.control.synthetic import World
from benchmarks.control.synthetic_acceptance import AcceptanceLaw, Profile
from benchmarks.control.synthetic_worlds import (
    B200_7B_FP8,
    H100_7B,
    H200_70B,
    H200_MOE,
)
from benchmarks.control.trace_world import CostCurve, Points

NUM_STEPS = 1500
"""Steps of a run: a cold start weighs more than on a server that is up for hours."""
NUM_POSITIONS = 8

_ROOFLINES = (H100_7B, H200_70B, B200_7B_FP8, H200_MOE)
_Draw = np.random.Generator


@dataclass(frozen=True)
class DrawnCost:
    """A roofline with what real engines add to it; times in seconds, no noise."""

    base_s: float
    """Reading the weights once: a pass over one row."""
    bound_rows: float
    """Rows whose arithmetic takes as long as that."""
    verify_entry: float
    """Of verifying at all, as a fraction of `base_s`: on a CPU a second row is dear
    and the next ones are nearly free."""
    mixed_entry: float
    """Of unequal draft lengths, the same: no CUDA graph of the whole step."""
    context_token_s: float
    draft_entry_s: float
    """Of drafting at all: launches, and the pass over the rows verified."""
    draft_step_s: float
    draft_row_s: float
    """Of one more request in a draft step."""
    num_layers: int
    graph_rows: int
    """Rows are padded to a multiple of this, beyond 4; 1 for none."""

    def verify_s(
        self, num_requests: int, rows: Points, context: float, is_uniform: bool
    ) -> Points:
        rows = np.asarray(rows, dtype=float)
        padded = rows
        if self.graph_rows > 1:
            by_graph = np.ceil(rows / self.graph_rows) * self.graph_rows
            padded = np.where(rows <= 4, 2.0 ** np.ceil(np.log2(rows)), by_graph)
        relative = np.hypot(1.0, padded / self.bound_rows)
        relative = relative + self.verify_entry * (rows > num_requests)
        if not is_uniform:
            relative = relative + self.mixed_entry
        seconds: Points = self.base_s * relative + context * self.context_token_s
        return seconds

    def draft_s(self, num_requests: int, depth: int, context: float) -> float:
        if not depth:
            return 0.0
        kv_s = context * self.context_token_s / self.num_layers
        step_s = self.draft_step_s + num_requests * self.draft_row_s + kv_s
        return self.draft_entry_s + depth * step_s

    def catch_up_s(self, num_tokens: int) -> float:
        return self.draft_entry_s + num_tokens * self.draft_row_s / 2


def tuning_worlds(count: int) -> Iterator[World]:
    """Worlds that constants may be chosen by."""
    return (random_world(2 * i) for i in range(count))


def held_out_worlds(count: int) -> Iterator[World]:
    """Worlds that nothing was chosen by."""
    return (random_world(2 * i + 1) for i in range(count))


def random_world(seed: int) -> World:
    """The world of a seed."""
    draw = np.random.default_rng([seed, 47])
    is_cpu = draw.random() < 0.45
    num_requests = _log_uniform(draw, 1, 32 if is_cpu else 256)
    load = _load(draw, round(num_requests), 48 if is_cpu else 256)
    is_shared = is_cpu and draw.random() < 0.4
    constrained = draw.choice([0.0, 0.0, 0.5, 1.0])
    return World(
        name=f"{'cpu' if is_cpu else 'gpu'}-{seed}",
        law=_law(draw),
        cost=_cpu(draw) if is_cpu else _gpu(draw),
        num_requests=round(num_requests),
        load=load,
        max_draft_length=NUM_POSITIONS,
        prompt_tokens=round(_log_uniform(draw, 32, 8000)),
        mean_tokens=round(_log_uniform(draw, 60, 1500)),
        sampled_share=float(draw.choice([0.0, 0.0, 0.5, 1.0])),
        constrained_share=float(constrained),
        constrained_loss=float(draw.uniform(0.0, 3.0)),
        noise=float(_log_uniform(draw, 0.01, 0.08)),
        slow_noise=float(draw.uniform(0.0, 0.03)),
        flicker=float(draw.uniform(0.01, 0.05)) if is_shared else 0.0,
        spike_share=float(draw.choice([0.0, 0.002, 0.008])),
        admission_steps=int(draw.choice([1, 8])),
        # Under async scheduling an outcome is known one step later.
        outcome_delay_steps=0 if is_cpu else 1,
        sees_shadow_drafts=is_cpu,
        is_stationary=False,
    )


def _log_uniform(draw: _Draw, low: float, high: float) -> float:
    return float(np.exp(draw.uniform(np.log(low), np.log(high))))


def _cpu(draw: _Draw) -> CostCurve:
    base_s = _log_uniform(draw, 4e-3, 150e-3)
    step = _log_uniform(draw, 0.02, 0.25)
    return DrawnCost(
        base_s,
        bound_rows=_log_uniform(draw, 5, 64),
        verify_entry=float(draw.choice([0.0, draw.uniform(0.0, 0.45)])),
        mixed_entry=0.0,
        context_token_s=base_s * _log_uniform(draw, 3e-6, 1e-4),
        draft_entry_s=base_s * draw.uniform(0.0, 0.06),
        draft_step_s=base_s * step,
        draft_row_s=base_s * step * _log_uniform(draw, 0.01, 0.15),
        num_layers=round(_log_uniform(draw, 12, 48)),
        graph_rows=1,
    )


def _gpu(draw: _Draw) -> CostCurve:
    if draw.random() < 0.3:
        machine = _ROOFLINES[int(draw.integers(len(_ROOFLINES)))]
        launch_s = machine.launch_s * _log_uniform(draw, 0.5, 2.0)
        draft_launch_s = machine.draft_launch_s * _log_uniform(draw, 0.5, 2.0)
        return replace(machine, launch_s=launch_s, draft_launch_s=draft_launch_s)
    base_s = _log_uniform(draw, 2e-3, 40e-3)
    step = _log_uniform(draw, 0.02, 0.2)
    return DrawnCost(
        base_s,
        bound_rows=_log_uniform(draw, 60, 600),
        verify_entry=draw.uniform(0.0, 0.12),
        mixed_entry=draw.uniform(0.0, 0.15),
        context_token_s=base_s * _log_uniform(draw, 1e-6, 3e-5),
        draft_entry_s=base_s * draw.uniform(0.0, 0.3),
        draft_step_s=base_s * step,
        draft_row_s=base_s * step * _log_uniform(draw, 0.001, 0.02),
        num_layers=round(_log_uniform(draw, 24, 80)),
        graph_rows=int(draw.choice([1, 8, 16])),
    )


def _profile(draw: _Draw) -> Profile:
    kind = draw.random()
    if kind < 0.2:  # drafts of a content that the MTP layers were not trained for
        first, decay = draw.uniform(0.0, 0.15), 1.0
    elif kind < 0.35:  # one trained position
        first, decay = draw.uniform(0.5, 0.8), draw.uniform(0.2, 0.6)
    else:
        first, decay = draw.uniform(0.35, 0.95), draw.uniform(0.85, 1.0)
    return tuple(float(first * decay**j) for j in range(NUM_POSITIONS))


def _law(draw: _Draw) -> AcceptanceLaw:
    num_kinds = int(draw.choice([1, 1, 2]))
    num_phases = int(draw.choice([0, 0, 1, 2, 4]))
    steps = sorted(int(s) for s in draw.integers(100, NUM_STEPS, num_phases))
    phases = [(step, tuple(_profile(draw) for _ in range(num_kinds))) for step in steps]
    return AcceptanceLaw(
        tuple(_profile(draw) for _ in range(num_kinds)),
        spread=float(draw.choice([0.0, draw.uniform(0.0, 1.3)])),
        context_decay=float(draw.choice([0.0, 0.0, draw.uniform(0.0, 0.4)])),
        drift=float(draw.choice([0.0, 0.0, draw.uniform(0.0, 1.5)])),
        drift_period_steps=_log_uniform(draw, 200, 3000),
        phases=tuple(phases),
        bursts=float(draw.choice([0.0, draw.uniform(0.0, 1.5)])),
        burst_steps=_log_uniform(draw, 8, 100),
        sampled_loss=float(draw.uniform(0.0, 1.5)),
    )


def _load(draw: _Draw, start: int, most: int) -> tuple[tuple[int, int], ...]:
    kind = draw.random()
    if kind < 0.4:
        return ()
    if kind < 0.7:  # a few abrupt changes
        steps = sorted(int(s) for s in draw.integers(50, NUM_STEPS, 3))
        return tuple((step, round(_log_uniform(draw, 1, most))) for step in steps)
    # Requests come and go all the time.
    changes, level, step = [], float(start), 0
    while (step := step + int(draw.integers(10, 80))) < NUM_STEPS:
        level = min(max(level * float(np.exp(draw.normal(0.0, 0.4))), 1.0), most)
        changes.append((step, round(level)))
    return tuple(changes)
