"""``python -m benchmarks trace time``: microseconds that a controller takes."""

from collections.abc import Sequence
from time import perf_counter_ns

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.control.synthetic import World
from benchmarks.control.synthetic_worlds import COSTS, SPREAD_LAW
from benchmarks.control.trace_replay import make_named_controller
from benchmarks.spread import Spread
from vllm_mtp.config import DEFAULT_DRAFT_LENGTH

BLOCK_STEPS = 64
"""Longer than the time between two searches for a plan, so that each block has its
share of them."""
WARM_UP_STEPS = 200


def time_controller(
    name: str, num_requests: int, num_blocks: int
) -> tuple[Spread, Spread]:
    """Time a controller on the machine that this runs on.

    Args:
        name: Of the controller.
        num_requests: Batch size.
        num_blocks: Blocks of `BLOCK_STEPS` steps.

    Returns:
        Microseconds of a call of ``decide``; and of a step (``may_draft``, ``decide``,
        ``observe``), the mean of each block.
    """
    world = World("time", SPREAD_LAW, COSTS["dense 7B, H100"], num_requests)
    engine = world.start(0)
    controller = make_named_controller(name, DEFAULT_DRAFT_LENGTH)
    decide_us, step_us = [], []
    for _ in range(WARM_UP_STEPS + num_blocks * BLOCK_STEPS):
        requests = engine.begin()
        began = perf_counter_ns()
        controller.may_draft()
        asked = perf_counter_ns()
        decision = controller.decide(requests)
        decided = perf_counter_ns()
        _, heard = engine.step(decision)
        observing = perf_counter_ns()
        for outcome in heard:
            controller.observe(outcome)
        observed = perf_counter_ns()
        decide_us.append((decided - asked) / 1e3)
        step_us.append((decided - began + observed - observing) / 1e3)
    decide_us, step_us = decide_us[WARM_UP_STEPS:], step_us[WARM_UP_STEPS:]
    blocks = [
        sum(step_us[first : first + BLOCK_STEPS]) / BLOCK_STEPS
        for first in range(0, len(step_us), BLOCK_STEPS)
    ]
    return Spread.of(decide_us), Spread.of(blocks)


def run_timing(
    names: Sequence[str], batches: Sequence[int], num_blocks: int, console: Console
) -> None:
    """Print the table.

    Raises:
        ConfigError: A name that no controller has.
    """
    table = Table(
        title=f"Microseconds, median and quartiles (K_max {DEFAULT_DRAFT_LENGTH}; "
        f"{num_blocks * BLOCK_STEPS} steps)",
        box=box.SIMPLE_HEAVY,
        pad_edge=False,
    )
    table.add_column("controller", no_wrap=True)
    for header in ("requests", "decide", "decide + observe\nreplans included"):
        table.add_column(header, justify="right", no_wrap=True)
    for name in names:
        for num_requests in batches:
            spreads = time_controller(name, num_requests, num_blocks)
            table.add_row(name, str(num_requests), *map(_text, spreads))
    console.print(table)


def _text(spread: Spread) -> str:
    return f"{spread.median:.0f} ({spread.lower:.0f}..{spread.upper:.0f})"
