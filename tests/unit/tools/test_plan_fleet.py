"""Fleets: the arithmetic of layouts, and the trace lab in the same time."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.control.synthetic import World
from benchmarks.control.synthetic_acceptance import AcceptanceLaw
from benchmarks.control.trace_replay import make_named_controller
from vllm_mtp.cli.main import app
from vllm_mtp.config import ConfigError
from vllm_mtp.tools.plan import PlanOptions
from vllm_mtp.tools.plan_cost import (
    B200,
    DENSE_7B,
    DENSE_70B,
    H100,
    H200,
    MOE_671B,
    RooflineCost,
)
from vllm_mtp.tools.plan_fleet import (
    FleetOptions,
    Layout,
    ReplicaCost,
    layouts_of,
    plan_fleet,
)

DEMAND = 50_000.0
ACCEPTANCE = (0.8, 0.7, 0.6)
WARM_UP_STEPS, NUM_STEPS = 600, 2000
"""All requests begin together; by then they end one by one."""
OPTIONS = FleetOptions(PlanOptions(acceptance=ACCEPTANCE), DEMAND, max_tpot_ms=20.0)
ON_H200 = PlanOptions(acceptance=ACCEPTANCE, hardware=H200, model=DENSE_70B)
MOE = PlanOptions(acceptance=ACCEPTANCE, hardware=B200, model=MOE_671B, is_fp8=True)


def test_the_best_layout_is_the_cheapest_of_all_that_keep_the_bound() -> None:
    fleet = plan_fleet(OPTIONS)
    every = [each for n in (1, 2, 4, 8) for each in layouts_of(OPTIONS, n)]
    assert fleet.best.num_gpus == min(each.num_gpus for each in every)
    assert all(each.tpot_ms <= 20.0 for each in every)
    plain = fleet.without_speculation
    assert plain is not None
    assert plain.draft_length == 0 < fleet.best.draft_length
    assert fleet.best.num_gpus < plain.num_gpus


def test_replicas_serve_the_demand_and_are_paid_for_it() -> None:
    for layout in plan_fleet(replace(OPTIONS, gpu_hour_price=2.0)).layouts:
        assert layout.replicas * layout.replica_tokens_per_s >= DEMAND
        assert (layout.replicas - 1) * layout.replica_tokens_per_s < DEMAND
        gpu_hours = layout.num_gpus / 3600 / (DEMAND / 1e6)
        assert layout.gpu_hours_per_million == pytest.approx(gpu_hours)
        assert layout.cost_per_million == pytest.approx(2.0 * gpu_hours)


def test_a_tighter_bound_costs_more() -> None:
    bounds = (100.0, 20.0, 10.0)
    fleets = [
        plan_fleet(FleetOptions(ON_H200, DEMAND, max_tpot_ms=bound)).best
        for bound in bounds
    ]
    gpus = [each.num_gpus for each in fleets]
    assert gpus == sorted(gpus)
    assert gpus[0] < gpus[-1]


def test_models_that_do_not_fit_take_more_gpus() -> None:
    """70B in 16 bits are 140 GB, with KV more than the 127 GB used of an H200."""
    sizes = [each.gpus_per_replica for each in plan_fleet(
        FleetOptions(ON_H200, DEMAND)
    ).layouts]  # fmt: skip
    assert sizes == [2, 4, 8]
    small = replace(H100, memory_bytes=15e9)
    plan = PlanOptions(hardware=small, model=MOE_671B, is_fp8=True)
    options = FleetOptions(plan, DEMAND)
    fits = plan_fleet(options).layouts
    assert [each.gpus_per_replica for each in fits] == [64]
    tiny = PlanOptions(hardware=replace(H100, memory_bytes=1e9), model=DENSE_7B)
    with pytest.raises(ConfigError, match="no replica of up to 8 GPUs holds dense 7B"):
        plan_fleet(FleetOptions(tiny, DEMAND))


def test_hidden_sizes_come_out_as_published() -> None:
    for model, published in ((DENSE_7B, 4096), (DENSE_70B, 8192), (MOE_671B, 7168)):
        found = ReplicaCost(RooflineCost(H100, model)).hidden_size
        assert found == pytest.approx(published, rel=0.05)


def simulated(options: FleetOptions, layout: Layout, controller: str) -> float:
    """Tokens per second of a replica in the trace lab, without noise."""
    plan = options.plan
    cost = ReplicaCost(
        RooflineCost(plan.hardware, plan.model, layout.gpus_per_replica, plan.is_fp8)
    )
    world = World(
        "planned",
        AcceptanceLaw((plan.acceptance,)),
        cost,
        num_requests=layout.batch,
        # Lengths of prompts are log-normal there, with this median.
        prompt_tokens=round(options.prompt_tokens / math.exp(0.5**2 / 2)),
        mean_tokens=options.answer_tokens,
        noise=0.0,
        slow_noise=0.0,
        spike_share=0.0,
        admission_steps=1,
        prefill_token_s=cost.prefill_token_s,
    )
    engine = world.start(1)
    chosen = make_named_controller(controller, plan.max_draft_length)
    tokens, seconds = 0, 0.0
    for step in range(NUM_STEPS):
        outcome, known = engine.step(chosen.decide(engine.begin()))
        for each in known:
            chosen.observe(each)
        if step >= WARM_UP_STEPS:
            tokens += outcome.num_decode_requests + outcome.num_accepted_tokens
            seconds += outcome.step_time_s
    return tokens / seconds


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        FleetOptions(ON_H200, DEMAND, 1024, 300, max_tpot_ms=30.0),
        FleetOptions(MOE, DEMAND, 256, 400, max_tpot_ms=10.0),
    ],
    ids=("dense 7B", "dense 70B", "MoE 671B"),
)
def test_the_trace_lab_takes_the_time_that_was_planned(options: FleetOptions) -> None:
    best = plan_fleet(options).best
    fixed = simulated(options, best, f"fixed-{best.draft_length}")
    assert fixed == pytest.approx(best.replica_tokens_per_s, rel=0.05)


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    arguments = ["plan", "--demand", "50000", "--gpu-hour-price", "2"]
    result = CliRunner().invoke(app, [*arguments, "--output", str(path)])
    assert result.exit_code == 0, result.output
    assert "Cheapest: " in result.stdout
    assert "Without speculation: " in result.stdout
    assert "Of a fleet is assumed, too" in " ".join(result.stdout.split())
    written = json.loads(path.read_text())
    assert written["best"] in written["layouts"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--demand", "0"], "demand: 0.0 is not allowed; must be a number from 1 to"),
        (["--answer", "0"], "answer: 0 is not allowed"),
        (["--prompt", "-1"], "prompt: -1 is not allowed"),
        (["--max-tpot-ms", "0"], "max-tpot-ms: 0.0 is not allowed"),
        (
            ["--max-tpot-ms", "0.02"],
            "demand: no replica of up to 8 GPUs holds dense 7B",
        ),
        (["--gpu-hour-price", "-1"], "gpu-hour-price: -1.0 is not allowed"),
    ],
)
def test_a_wrong_option_is_one_sentence(arguments: list[str], words: str) -> None:
    demand = [] if "--demand" in arguments else ["--demand", "1000"]
    result = CliRunner().invoke(app, ["plan", *demand, *arguments])
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_bound_without_a_demand_is_refused() -> None:
    result = CliRunner().invoke(app, ["plan", "--max-tpot-ms", "20"])
    assert result.exit_code == 2
    assert "demand: name the tokens per second of the fleet" in result.stderr
