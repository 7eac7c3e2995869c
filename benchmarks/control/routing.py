"""``python -m benchmarks trace routing``: is routing by acceptance worth building?

Two replicas in each held-out world, with equally many running requests and a controller
each. *Round robin*: either gets requests as they come. *Routed*: one gets those that
draft better than the median request, the other one the rest. The router knows the true
acceptance of every request when it arrives, so the gain is more than a router that has
to guess can bring.

The figure is the replica time of the same tokens: half of them of either kind, since
lengths of answers do not depend on acceptance. Goodputs of the two replicas are not
added up: that would reward serving the easy half faster. Expected tokens and noise-free
times are counted, as in `held_out`, and intervals are bootstrapped over worlds.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from benchmarks.control.held_out import CONTENDERS, bootstrap
from benchmarks.control.random_worlds import NUM_STEPS, held_out_worlds
from benchmarks.control.synthetic import SyntheticEngine, World
from benchmarks.control.trace_oracle import expected
from benchmarks.control.trace_world import Array
from vllm_mtp.config import ConfigError
from vllm_mtp.records import DraftDecision
from vllm_mtp.tools.provenance import collect_provenance, write_json

CONTROLLER = "goodput"
WORTH_BUILDING = 0.05
"""Gain from which on a router would be worth its code."""
_POOL = 128
"""Requests that are drawn for each one admitted: the median is taken of them."""
_RESULT = "routing.json"


class RoutedEngine(SyntheticEngine):
    """A replica that gets the requests on one side of the median."""

    def __init__(self, world: World, seed: int, gets_good: bool) -> None:
        super().__init__(world, seed)
        self._gets_good = gets_good
        self._num_wanted = 0

    def _admit(self, count: int) -> None:
        self._num_wanted = count
        super()._admit(count * _POOL)

    def _let_in(self, ids: list[str], columns: Mapping[str, Array]) -> None:
        drafts_well = self._expected_accepted(columns)
        order = np.argsort(drafts_well, kind="stable")
        half = len(ids) // 2
        side = order[half:] if self._gets_good else order[:half]
        # As they came, not the best ones: any of that side.
        chosen = np.sort(side)[: self._num_wanted]
        super()._let_in(
            [ids[i] for i in chosen],
            {name: values[chosen] for name, values in columns.items()},
        )

    def _expected_accepted(self, columns: Mapping[str, Array]) -> Array:
        """Draft tokens of the longest draft that each request would have accepted."""
        conditional = self.world.law.conditional(
            self.step_number,
            self.world.max_draft_length,
            columns["kinds"],
            columns["shifts"],
            columns["contexts"],
        )
        result: Array = np.cumprod(conditional, axis=1).sum(axis=1)
        return result


class Routing(NamedTuple):
    """Of one world."""

    world: str
    gain: float
    """Replica time of round robin over that of routing, minus 1."""
    seconds_per_token: tuple[float, float, float]
    """Of round robin, of the good side and of the other one."""


def compare_routing(world: World, num_steps: int = NUM_STEPS) -> Routing:
    """Run both ways to route in a world."""
    seed = int(world.name.rpartition("-")[2])
    mixed = [
        seconds_per_token(world, SyntheticEngine(world, seed + i), num_steps)
        for i in range(2)
    ]
    good, poor = (
        seconds_per_token(world, RoutedEngine(world, seed + i, not i), num_steps)
        for i in range(2)
    )
    round_robin = float(np.mean(mixed))
    gain = round_robin / ((good + poor) / 2) - 1
    return Routing(world.name, gain, (round_robin, good, poor))


def seconds_per_token(world: World, engine: SyntheticEngine, num_steps: int) -> float:
    """Of a replica with a controller of its own; expected tokens, no noise."""
    controller = CONTENDERS[CONTROLLER](world)
    tokens = seconds = 0.0
    has_drafts = False
    pending: tuple[DraftDecision, float] | None = None
    for _ in range(num_steps):
        requests = engine.begin()
        truth = engine.truth()
        if pending is not None and truth.num_requests:
            decision, backfill_s = pending
            worth = expected(truth, world.cost, decision)
            tokens += worth.tokens
            seconds += worth.seconds + backfill_s
            if has_drafts and not decision.draft_depth:
                # The MTP layers pass over verified rows though they do not draft.
                seconds += world.cost.draft_s(truth.num_requests, 1, truth.context)
            has_drafts = any(decision.num_draft_tokens.values())
        controller.may_draft()
        chosen = controller.decide(requests)
        pending = chosen, engine.resume_s(chosen.draft_depth)
        _, known = engine.step(chosen)
        for outcome in known:
            controller.observe(outcome)
    return seconds / tokens


def run_routing(
    num_worlds: int, output: Path, console: Console, num_steps: int = NUM_STEPS
) -> dict[str, Any]:
    """Compare in all worlds; print the gain, write JSON.

    Raises:
        ConfigError: There are too few worlds, or there is no folder.
    """
    if num_worlds < 2:
        raise ConfigError(f"worlds: {num_worlds}; expected at least 2.")
    if not output.is_dir():
        raise ConfigError(f"output: {str(output)!r} is not a folder.")
    found = [compare_routing(each, num_steps) for each in held_out_worlds(num_worlds)]
    gain = bootstrap([each.gain for each in found])
    result = {
        "provenance": collect_provenance(sys.argv),
        "options": {"worlds": num_worlds, "steps": num_steps, "replicas": 2},
        "gain": gain._asdict(),
        "worlds": [each._asdict() for each in found],
    }
    verdict = "worth building" if gain.low >= WORTH_BUILDING else "not worth building"
    console.print(
        f"Routing by acceptance, {num_worlds} held-out worlds, 2 replicas: gain "
        f"{100 * gain.value:.1f} % ({100 * gain.low:.1f} .. {100 * gain.high:.1f}), "
        f"at most {100 * max(each.gain for each in found):.1f} %: {verdict}",
        highlight=False,
    )
    write_json(output / _RESULT, result)
    console.print(f"Wrote {_RESULT} to {output}", soft_wrap=True)
    return result
