"""``python -m benchmarks trace held-out``: controllers in worlds nothing was tuned by.

Each contender runs in each world with the same seed. Two figures of a run count:

regret
    ``1 - t* / t``: share of the time that an oracle which knows acceptance and cost
    would not have needed for the same tokens (see `trace_replay`).
speed over K = 0
    Time of the same tokens without drafts, over the time of the run. The promise to
    users is that its 5th percentile over worlds is at least `PROMISE`.

Expected tokens and noise-free times are counted, with KV backfills and exploration, so
luck in sampling is in neither figure. Intervals are bootstrapped over worlds, and those
of differences over pairs: two contenders in one world.
"""

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.control.random_worlds import (
    NUM_STEPS,
    held_out_worlds,
    tuning_worlds,
)
from benchmarks.control.synthetic import World
from benchmarks.control.trace_oracle import (
    best_decision,
    expected,
    expected_uniform,
)
from benchmarks.control.trace_world import Array
from vllm_mtp.config import (
    ConfigError,
    MTPPlusConfig,
)
from vllm_mtp.control.controller import Controller
from vllm_mtp.control.factory import make_controller
from vllm_mtp.draft_lengths import (
    graph_tiers,
)
from vllm_mtp.records import DraftDecision
from vllm_mtp.tools.provenance import collect_provenance, write_json

PROMISE = 0.98
"""Least 5th percentile over worlds of the speed over K = 0."""
CHANGE_STEPS = 200
"""Steps after a change of acceptance in which a controller may be slower."""
_ORACLE_STEPS = 16
"""The oracle's gain over the best uniform draft length is worked out that often."""
_MAX_GRAPH_ROWS = 512
"""Rows of vLLM's longest CUDA graph, of the GPU worlds."""
_NUM_RESAMPLES = 2000


class Score(NamedTuple):
    """One contender in one world."""

    world: str
    regret: float
    regret_after_changes: float | None
    """Within `CHANGE_STEPS` of each abrupt change of acceptance."""
    over_no_drafts: float
    over_best_fixed: float
    """Speed over the draft length that would have been the best, never changed."""
    best_fixed: int
    explored: float
    """Share of the steps that explored."""
    switches: int
    host_us: float
    """Microseconds of the scheduler's thread for each step."""


Contender = Callable[[World], Controller]


def _options(name: str) -> Contender:
    def build(world: World) -> Controller:
        is_cpu = world.sees_shadow_drafts
        return make_controller(
            MTPPlusConfig(controller=name),  # type: ignore[arg-type]
            world.max_draft_length,
            None if is_cpu else graph_tiers(world.max_draft_length),
            max_graph_rows=0 if is_cpu else _MAX_GRAPH_ROWS,
            sees_shadow_drafts=is_cpu,
            is_cpu=is_cpu,
        )

    return build


CONTENDERS: Mapping[str, Contender] = {
    name: _options(name) for name in ("goodput", "threshold")
}


def score(world: World, controller: Controller, num_steps: int = NUM_STEPS) -> Score:
    """Run a controller in a world.

    Args:
        world: Its seed is in its name, so equal worlds draw equal requests.
        controller: A fresh one.
        num_steps: Engine steps.
    """
    engine = world.start(int(world.name.rpartition("-")[2]))
    tally = _Tally(world)
    host_s = 0.0
    pending: tuple[DraftDecision, float] | None = None
    for step in range(num_steps):
        requests = engine.begin()
        if pending is not None:
            tally.add(step, engine.truth(), *pending)
        began_s = time.perf_counter()
        may_draft = controller.may_draft()
        decision = controller.decide(requests)
        host_s += time.perf_counter() - began_s
        assert may_draft or not decision.draft_depth, decision
        pending = decision, engine.resume_s(decision.draft_depth)
        _, known = engine.step(decision)
        began_s = time.perf_counter()
        for outcome in known:
            controller.observe(outcome)
        host_s += time.perf_counter() - began_s
    return tally.score(1e6 * host_s / num_steps)


class _Tally:
    """Adds up what decisions were worth, each when its drafts are verified."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._changes = [step for step, _ in world.law.phases]
        self._seconds = self._oracle_s = 0.0
        self._changed_s = self._changed_oracle_s = 0.0
        """The same after changes of acceptance."""
        self._uniform_s: Array = np.zeros(world.max_draft_length + 1)
        self._gain = 1.0
        self._has_drafts = False
        """The step before drafted."""
        self._num_steps = self._num_explored = self._num_switches = 0
        self._depth = 0

    def add(
        self, step: int, truth: Any, decision: DraftDecision, backfill_s: float
    ) -> None:
        if not truth.num_requests:
            return
        cost = self._world.cost
        chosen = expected(truth, cost, decision)
        uniform = np.array([u.goodput for u in expected_uniform(truth, cost)])
        if self._num_steps % _ORACLE_STEPS == 0:
            self._gain = best_decision(truth, cost).goodput / uniform.max()
        self._num_steps += 1
        seconds = chosen.seconds + backfill_s
        if self._has_drafts and not decision.draft_depth:
            # The MTP layers pass over verified rows though they do not draft.
            seconds += cost.draft_s(truth.num_requests, 1, truth.context)
        self._has_drafts = any(decision.num_draft_tokens.values())
        oracle_s = chosen.tokens / (uniform.max() * self._gain)
        self._seconds += seconds
        self._oracle_s += oracle_s
        if any(0 <= step - first < CHANGE_STEPS for first in self._changes):
            self._changed_s += seconds
            self._changed_oracle_s += oracle_s
        self._uniform_s += chosen.tokens / uniform
        if decision.reason == "explore":
            self._num_explored += 1
        elif decision.draft_depth != self._depth:
            self._num_switches += 1
            self._depth = decision.draft_depth

    def score(self, host_us: float) -> Score:
        speeds = self._uniform_s / self._seconds
        best = int(np.argmin(speeds))
        return Score(
            self._world.name,
            float(1.0 - self._oracle_s / self._seconds),
            float(1.0 - self._changed_oracle_s / self._changed_s)
            if self._changed_s
            else None,
            float(speeds[0]),
            float(speeds[best]),
            best,
            self._num_explored / self._num_steps,
            self._num_switches,
            host_us,
        )


class Interval(NamedTuple):
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float


def bootstrap(
    values: Sequence[float], figure: Callable[[Array], Any] = np.mean
) -> Interval:
    """Interval of a figure over worlds.

    Args:
        values: One of each world; none gives no number.
        figure: Of an array, along its last axis (``axis=-1``).
    """
    if not len(values):
        return Interval(math.nan, math.nan, math.nan)
    known = np.asarray(values)
    draw = np.random.default_rng(0)
    resampled = known[draw.integers(len(known), size=(_NUM_RESAMPLES, len(known)))]
    low, high = np.quantile(figure(resampled, axis=-1), (0.025, 0.975))  # type: ignore[call-arg]
    return Interval(float(figure(known, axis=-1)), float(low), float(high))  # type: ignore[call-arg]


def fifth_percentile(values: Array, axis: int = -1) -> Any:
    """What 19 of 20 worlds exceed."""
    return np.quantile(values, 0.05, axis=axis)


def summary(scores: Sequence[Score]) -> dict[str, Any]:
    """Figures of one contender."""
    speeds = [s.over_no_drafts for s in scores]
    return {
        "regret": bootstrap([s.regret for s in scores]),
        "regret_after_changes": bootstrap(_after_changes(scores)),
        "regret_p95": float(np.quantile([s.regret for s in scores], 0.95)),
        "over_no_drafts": bootstrap(speeds),
        "over_no_drafts_p5": bootstrap(speeds, fifth_percentile),
        "over_best_fixed": bootstrap([s.over_best_fixed for s in scores]),
        "explored": float(np.mean([s.explored for s in scores])),
        "switches": float(np.mean([s.switches for s in scores])),
        "host_us": float(np.median([s.host_us for s in scores])),
    }


def _after_changes(scores: Sequence[Score]) -> list[float]:
    found = [score.regret_after_changes for score in scores]
    return [regret for regret in found if regret is not None]


def difference(scores: Sequence[Score], base: Sequence[Score]) -> dict[str, Interval]:
    """Of two contenders, paired by world: positive regret is worse."""
    pairs = list(zip(scores, base, strict=True))
    assert all(a.world == b.world for a, b in pairs)
    after = [
        a.regret_after_changes - b.regret_after_changes
        for a, b in pairs
        if a.regret_after_changes is not None and b.regret_after_changes is not None
    ]
    return {
        "regret": bootstrap([a.regret - b.regret for a, b in pairs]),
        "regret_after_changes": bootstrap(after),
        "over_no_drafts": bootstrap(
            [a.over_no_drafts - b.over_no_drafts for a, b in pairs]
        ),
    }


def run_held_out(
    names: Sequence[str],
    num_worlds: int,
    output: Path,
    console: Console,
    *,
    is_tuning: bool = False,
) -> dict[str, Any]:
    """Run contenders in all worlds; print a table, write JSON.

    Args:
        names: Of `CONTENDERS`; the first is what others are compared with.
        num_worlds: So many.
        output: An existing folder.
        console: To print to.
        is_tuning: In the worlds for tuning instead.

    Raises:
        ConfigError: No contender has this name, or there is no folder.
    """
    worlds = _checked_worlds(names, num_worlds, output, is_tuning)
    scores = {name: _all_scores(worlds, CONTENDERS[name]) for name in names}
    base = scores[names[0]]
    result = {
        "provenance": collect_provenance(sys.argv),
        "options": {
            "worlds": num_worlds,
            "split": "tuning" if is_tuning else "held-out",
            "steps": NUM_STEPS,
            "promise": PROMISE,
        },
        "summaries": {
            name: {
                key: value._asdict() if isinstance(value, Interval) else value
                for key, value in summary(found).items()
            }
            for name, found in scores.items()
        },
        "differences": {
            name: {k: v._asdict() for k, v in difference(found, base).items()}
            for name, found in scores.items()
            if name != names[0]
        },
        "scores": {
            name: [s._asdict() for s in found] for name, found in scores.items()
        },
    }
    print_summary(result, console)
    name = "tuning.json" if is_tuning else "held-out.json"
    write_json(output / name, result)
    console.print(f"Wrote {name} to {output}", soft_wrap=True)
    return result


def _checked_worlds(
    names: Sequence[str], num_worlds: int, output: Path, is_tuning: bool
) -> list[World]:
    for name in names:
        if name not in CONTENDERS:
            known = ", ".join(CONTENDERS)
            raise ConfigError(f"controller {name!r} does not exist: use {known}.")
    if num_worlds < 2:
        raise ConfigError(f"worlds: {num_worlds}; expected at least 2.")
    if not output.is_dir():
        raise ConfigError(f"output: {str(output)!r} is not a folder.")
    return list((tuning_worlds if is_tuning else held_out_worlds)(num_worlds))


def _all_scores(worlds: Iterable[World], contender: Contender) -> list[Score]:
    return [score(world, contender(world)) for world in worlds]


def print_summary(result: Mapping[str, Any], console: Console) -> None:
    """A table of all contenders."""
    options = result["options"]
    table = Table(title=f"{options['worlds']} {options['split']} worlds")
    for column in (
        "controller", "regret %", "p95", "after a change", "over K=0", "its p5",
        "over best K", "explored %", "switches", "host us",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "controller" else "right")
    for name, found in result["summaries"].items():
        p5 = found["over_no_drafts_p5"]
        table.add_row(
            name,
            _percent(found["regret"]),
            f"{100 * found['regret_p95']:.1f}",
            f"{100 * found['regret_after_changes']['value']:.2f}",
            f"{found['over_no_drafts']['value']:.3f}",
            f"{p5['value']:.3f} ({p5['low']:.3f} .. {p5['high']:.3f})",
            f"{found['over_best_fixed']['value']:.3f}",
            f"{100 * found['explored']:.1f}",
            f"{found['switches']:.0f}",
            f"{found['host_us']:.0f}",
        )
    console.print(table)
    for name, found in result["differences"].items():
        console.print(
            f"{name} beside the first: regret {_percent(found['regret'])} points, "
            f"after a change {_percent(found['regret_after_changes'])}"
        )


def _percent(found: Mapping[str, float]) -> str:
    value, low, high = (100 * found[key] for key in ("value", "low", "high"))
    return f"{value:.2f} ({low:.2f} .. {high:.2f})"
