"""Worlds by name: every acceptance law and cost curve, small and large batches."""

from collections.abc import Mapping

from benchmarks.control.synthetic import World
from benchmarks.control.synthetic_acceptance import AcceptanceLaw, decaying, geometric
from benchmarks.control.synthetic_cost import CPU_CORE_TABLE, CPU_TABLE, TableCost
from benchmarks.control.trace_world import CostCurve
from vllm_mtp.tools.plan_cost import (
    B200,
    DENSE_7B,
    DENSE_70B,
    H100,
    H200,
    MOE_671B,
    RooflineCost,
)

GOOD = geometric(0.8)
TUNED = decaying(0.81, 0.69, 0.64, 0.6, 0.55)
"""Conditional acceptance behind FastMTP's 81/56/36 %, continued by hand."""
UNTUNED = decaying(0.70, 0.16, 0.18, 0.15, 0.15)
"""Behind 70/11/2 %, a layer trained for one step; continued by hand."""
NEAR_ZERO = geometric(0.03)

H100_7B = RooflineCost(H100, DENSE_7B)
H200_70B = RooflineCost(H200, DENSE_70B, num_gpus=4, launch_s=1.5e-3)
B200_7B_FP8 = RooflineCost(B200, DENSE_7B, is_fp8=True)
H200_MOE = RooflineCost(
    H200, MOE_671B, num_gpus=16, is_fp8=True, launch_s=4e-3, draft_launch_s=0.25e-3
)

COSTS: Mapping[str, CostCurve] = {
    "0.43B, two CPU cores": CPU_TABLE,
    "109M, one CPU core": CPU_CORE_TABLE,
    "dense 7B, H100": H100_7B,
    "dense 70B, 4 x H200": H200_70B,
    "dense 7B in FP8, B200": B200_7B_FP8,
    "MoE 671B in FP8, 16 x H200": H200_MOE,
}
"""What the worlds run on: tables of measured times, then roofline models."""

SPREAD_LAW = AcceptanceLaw((geometric(0.7),), spread=1.2)

PHASE_STEPS = 600

_FLIP = tuple(
    (PHASE_STEPS * (i + 1), (NEAR_ZERO if i % 2 == 0 else GOOD,)) for i in range(8)
)
_SHIFT = tuple(
    (PHASE_STEPS * (i + 1), (UNTUNED if i % 2 == 0 else geometric(0.9),))
    for i in range(8)
)


def _law(*profiles: tuple[float, ...], **more: float) -> AcceptanceLaw:
    return AcceptanceLaw(tuple(profiles), **more)  # type: ignore[arg-type]


_STATIONARY = (
    World("cpu-1-good", _law(GOOD), CPU_TABLE),
    World("cpu-1-untuned", _law(UNTUNED), CPU_TABLE),
    World("cpu-1-near-zero", _law(NEAR_ZERO), CPU_TABLE),
    World("cpu-4-tuned", _law(TUNED), CPU_TABLE, 4),
    World("cpu-16-spread", SPREAD_LAW, CPU_TABLE, 16),
    World("core-16-good", _law(GOOD), CPU_CORE_TABLE, 16),
    World("core-16-untuned", _law(UNTUNED), CPU_CORE_TABLE, 16),
    World("h100-1-tuned", _law(TUNED), H100_7B),
    World("h100-32-tuned", _law(TUNED), H100_7B, 32),
    World("h100-256-spread", SPREAD_LAW, H100_7B, 256),
    World("h100-512-good", _law(GOOD), H100_7B, 512),
    World("h100-32-near-zero", _law(NEAR_ZERO), H100_7B, 32),
    World("h200-70b-64-kinds", _law(geometric(0.9), UNTUNED), H200_70B, 64),
    World(
        "h200-70b-16-long",
        _law(TUNED, context_decay=0.35),
        H200_70B,
        16,
        prompt_tokens=8000,
    ),
    World(
        "h200-70b-64-sampled", _law(TUNED, spread=0.5), H200_70B, 64, sampled_share=0.5
    ),
    World("b200-fp8-128-good", _law(GOOD), B200_7B_FP8, 128),
    World("moe-ep-8-tuned", _law(TUNED), H200_MOE, 8),
    World("moe-ep-128-tuned", _law(TUNED, spread=0.7), H200_MOE, 128),
    World("moe-ep-1024-good", _law(GOOD), H200_MOE, 1024),
    World("moe-ep-64-near-zero", _law(NEAR_ZERO), H200_MOE, 64),
)

_CHANGING = (
    World("cpu-1-drift", _law(geometric(0.6), drift=1.5), CPU_TABLE),
    World("h100-64-drift", _law(geometric(0.6), drift=1.5), H100_7B, 64),
    World("h200-70b-32-bursts", _law(geometric(0.7), bursts=1.5), H200_70B, 32),
    World("cpu-1-flip", AcceptanceLaw((GOOD,), phases=_FLIP), CPU_TABLE),
    World("cpu-8-flip", AcceptanceLaw((GOOD,), phases=_FLIP), CPU_TABLE, 8),
    World("h100-32-flip", AcceptanceLaw((GOOD,), phases=_FLIP), H100_7B, 32),
    World("h100-256-shift", AcceptanceLaw((GOOD,), phases=_SHIFT), H100_7B, 256),
    World("moe-ep-64-flip", AcceptanceLaw((GOOD,), phases=_FLIP), H200_MOE, 64),
    World("cpu-1-shift", AcceptanceLaw((GOOD,), phases=_SHIFT), CPU_TABLE),
    World(
        "h100-load",
        _law(TUNED),
        H100_7B,
        8,
        load=((600, 256), (1200, 16), (1800, 400), (2400, 1), (3000, 64)),
    ),
    World(
        "moe-ep-load",
        _law(TUNED),
        H200_MOE,
        4,
        load=((600, 256), (1200, 16), (1800, 768), (2400, 1), (3000, 64)),
    ),
)

WORLDS: Mapping[str, World] = {
    # vLLM schedules asynchronously on a GPU, not on a CPU.
    world.name: world.changed(sees_shadow_drafts=isinstance(world.cost, TableCost))
    for world in (
        *_STATIONARY,
        *(world.changed(is_stationary=False) for world in _CHANGING),
    )
}


def describe(world: World) -> str:
    """A world in one line."""
    machine = next(name for name, cost in COSTS.items() if cost == world.cost)
    changes = ", ".join(
        f"{num_requests} from step {step}" for step, num_requests in world.load
    )
    parts = [
        f"{world.num_requests} request{'s' if world.num_requests > 1 else ''}",
        machine,
        world.law.describe(),
    ]
    if changes:
        parts.append(f"load: {changes}")
    if world.sampled_share:
        parts.append(f"{100 * world.sampled_share:.0f} % sampled")
    if world.prompt_tokens != World.prompt_tokens:
        parts.append(f"prompts of {world.prompt_tokens:,} tokens")
    return "; ".join(parts)
