"""``python -m benchmarks trace replay``: controllers in synthetic and recorded worlds.

Needs neither a GPU nor vLLM: see `synthetic`, `trace_recorded` and `trace_replay` for
what the figures mean. The same options give the same figures on every machine.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from benchmarks.control.synthetic_worlds import COSTS, WORLDS
from benchmarks.control.trace_recorded import RecordedWorld, load_world
from benchmarks.control.trace_replay import Replay, make_named_controller, replay
from benchmarks.control.trace_report import print_report, write_plots
from benchmarks.control.trace_world import ReplayWorld
from vllm_mtp.config import DEFAULT_DRAFT_LENGTH, ConfigError
from vllm_mtp.tools.provenance import collect_provenance, write_json

CHANGE_STEPS = 200
"""Steps after a change in which a controller may be further from the best."""
MIN_STEPS = 50
TARGETED_CONTROLLER = "goodput"
LIMITS = {"stationary": 0.03, "recorded": 0.03, "after a change": 0.08}
"""Largest regret of the `goodput` controller."""


@dataclass(frozen=True)
class ReplayOptions:
    """What to run; checked by `parse_replay_options`."""

    worlds: tuple[ReplayWorld, ...]
    controllers: tuple[str, ...]
    num_steps: int
    num_seeds: int
    output: Path


def parse_replay_options(
    *,
    worlds: Sequence[str],
    traces: Sequence[Path],
    controllers: Sequence[str],
    num_steps: int,
    num_seeds: int,
    output: Path,
) -> ReplayOptions:
    """Check the options and read the traces.

    Args:
        worlds: Names; with neither these nor ``traces`` all synthetic worlds.
        traces: Recordings.
        controllers: Names.
        num_steps: Engine steps of each run.
        num_seeds: Runs of each controller in each world.
        output: An existing folder.

    Raises:
        ConfigError: One sentence about the first mistake.
    """
    _check(worlds, num_steps, num_seeds, output)
    for name in controllers:
        make_named_controller(name, DEFAULT_DRAFT_LENGTH)
    chosen = [WORLDS[name] for name in dict.fromkeys(worlds)]
    if not worlds and not traces:
        chosen = list(WORLDS.values())
    recorded = [load_world(path) for path in dict.fromkeys(traces)]
    for world in recorded:
        for name in controllers:
            make_named_controller(
                name, world.max_draft_length, world.sees_shadow_drafts
            )
    return ReplayOptions(
        (*chosen, *recorded),
        tuple(dict.fromkeys(controllers)),
        num_steps,
        num_seeds,
        output,
    )


def _check(worlds: Sequence[str], num_steps: int, num_seeds: int, output: Path) -> None:
    for name in worlds:
        if name not in WORLDS:
            raise ConfigError(
                f"world {name!r} does not exist: see `python -m benchmarks trace "
                f"worlds` for the {len(WORLDS)} that do."
            )
    if num_steps < MIN_STEPS:
        raise ConfigError(f"steps: {num_steps}; expected at least {MIN_STEPS}.")
    if num_seeds < 1:
        raise ConfigError(f"seeds: {num_seeds}; expected at least 1.")
    if not output.is_dir():
        raise ConfigError(f"output: {str(output)!r} is not a folder.")


def run_replays(options: ReplayOptions, console: Console) -> dict[str, Any]:
    """Run everything, print a table, write JSON and pictures.

    Returns:
        What was written to the file.
    """
    runs = []
    num_runs = len(options.worlds) * len(options.controllers)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("replaying", total=num_runs * options.num_seeds)
        for world in options.worlds:
            for controller in options.controllers:
                title = f"{controller} in {world.name}"
                progress.update(task, description=title)
                runs.append(
                    run_one(world, controller, options, lambda: progress.advance(task))
                )
    result = {
        "provenance": collect_provenance(sys.argv),
        "options": {
            "steps": options.num_steps,
            "seeds": list(range(options.num_seeds)),
            "controllers": list(options.controllers),
            "steps_after_a_change": CHANGE_STEPS,
            "regret_limit": LIMITS["stationary"],
        },
        "targets": targets(runs),
        "costs": cost_curves(),
        "runs": runs,
    }
    print_report(result, console)
    write_json(options.output / "replay.json", result)
    written = ["replay.json", *write_plots(result, options.output)]
    console.print(f"Wrote {', '.join(written)} to {options.output}", soft_wrap=True)
    return result


def run_one(
    world: ReplayWorld,
    controller: str,
    options: ReplayOptions,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """One controller in one world, over all seeds."""
    replays = []
    for seed in range(options.num_seeds):
        fresh = make_named_controller(
            controller, world.max_draft_length, world.sees_shadow_drafts
        )
        replays.append(replay(world, fresh, options.num_steps, seed))
        advance()
    best = _best_uniform(replays)
    after = [regrets_after_changes(world, run) for run in replays]
    every = [regret for regrets in after for regret in regrets]
    return {
        "world": world.name,
        "kind": kind_of(world),
        "controller": controller,
        "regret": _mean(run.regret() for run in replays),
        "regret_of_each_seed": [run.regret() for run in replays],
        "regret_after_changes": _mean(every) if every else None,
        "regret_after_changes_of_each_seed": after,
        "over_no_drafts": _mean(run.over_uniform(0) for run in replays),
        "best_static_draft_length": best,
        "over_best_static": _mean(run.over_uniform(best) for run in replays),
        "switches": _mean(run.num_switches() for run in replays),
        "share_of_exploration": _mean(run.share_of_exploration() for run in replays),
        "realised_tokens_per_s": _mean(run.realised_goodput for run in replays),
        "first_seed": _series(world, replays[0]),
    }


def kind_of(world: ReplayWorld) -> str:
    """Which target a world falls under."""
    if isinstance(world, RecordedWorld):
        return "recorded"
    return "stationary" if world.is_stationary else "changing"


def regrets_after_changes(world: ReplayWorld, run: Replay) -> list[float]:
    """Regret within `CHANGE_STEPS` of each change that the run outlasts by as many."""
    found = [run.regret_after(step, CHANGE_STEPS) for step in world.change_steps]
    return [regret for regret in found if regret is not None]


def _best_uniform(replays: Sequence[Replay]) -> int:
    """The draft length that, never changed, is the best over all seeds."""
    lengths = range(len(replays[0].uniform))
    return min(lengths, key=lambda k: _mean(run.over_uniform(k) for run in replays))


def _mean(values: Any) -> float:
    return statistics.fmean(values)


def _series(world: ReplayWorld, run: Replay) -> dict[str, Any] | None:
    """Depths step by step, for the picture; of worlds that change abruptly."""
    if not world.change_steps:
        return None
    return {
        "changes": list(world.change_steps),
        "steps": run.steps,
        "depths": run.depths,
        "mean_draft_lengths": [round(length, 2) for length in run.mean_lengths],
        "oracle_depths": run.oracle_depths,
    }


def targets(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The worst figure of each kind beside its limit."""
    found = []
    for name, limit in LIMITS.items():
        key = "regret_after_changes" if name == "after a change" else "regret"
        values = {
            run["world"]: run[key]
            for run in runs
            if run["controller"] == TARGETED_CONTROLLER
            and run[key] is not None
            and (key != "regret" or run["kind"] == name)
        }
        if values:
            worst = max(values, key=lambda world: values[world])
            found.append(
                {
                    "name": f"regret, {name}",
                    "limit": limit,
                    "value": values[worst],
                    "world": worst,
                    "passed": values[worst] <= limit,
                }
            )
    return found


def cost_curves() -> dict[str, Any]:
    """Times of a target pass over rows, for the picture: all models."""
    context, rows = 16 * 1024, np.unique(np.geomspace(1, 8192, 160).round())
    return {
        "context_tokens": context,
        "rows": rows.tolist(),
        "verify_ms": {
            name: (1e3 * curve.verify_s(16, rows, context, True)).round(4).tolist()
            for name, curve in COSTS.items()
        },
    }
