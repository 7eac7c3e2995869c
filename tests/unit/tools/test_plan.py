"""The arithmetic of speculation, against closed forms and against itself."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_mtp.cli.main import app
from vllm_mtp.tools.plan import (
    PlanOptions,
    ProbedStep,
    best_of,
    make_plan,
    rows_of,
    stops_paying_at,
)
from vllm_mtp.tools.plan_cost import DENSE_70B


def probed(draft_cost: float) -> tuple[ProbedStep, ...]:
    """Steps whose rows are free to verify."""
    return tuple(ProbedStep(k, 1.0, 1.0 + draft_cost * k) for k in range(9))


@pytest.mark.parametrize(
    ("probability", "draft_length", "expected"),
    [(0.8, 1, 1.80), (0.8, 2, 2.44), (0.8, 3, 2.95), (0.8, 4, 3.36), (0.5, 3, 1.88),
     (0.9, 3, 3.44)],
)  # fmt: skip
def test_the_published_table_is_reproduced(
    probability: float, draft_length: int, expected: float
) -> None:
    options = PlanOptions(acceptance=(probability,), probe=probed(0.0))
    row = rows_of(options, 1)[draft_length]
    assert row.acceptance_length == pytest.approx(expected, abs=0.005)
    assert row.speedup == row.speedup_if_drafts_were_free == row.acceptance_length


def test_positions_have_their_own_acceptance_and_the_last_repeats() -> None:
    options = PlanOptions(acceptance=(0.7, 0.5), probe=probed(0.1), max_draft_length=3)
    rows = rows_of(options, 1)
    lengths = [1.0, 1.7, 2.05, 2.225]
    assert [row.acceptance_length for row in rows] == pytest.approx(lengths)
    expected = [n / (1 + 0.1 * k) for k, n in enumerate(lengths)]
    assert [row.speedup for row in rows] == pytest.approx(expected)


def test_dear_drafts_make_shorter_ones_best() -> None:
    best = [
        best_of(
            rows_of(PlanOptions(acceptance=(0.7,), probe=probed(cost)), 1)
        ).draft_length
        for cost in (0.0, 0.05, 0.2, 0.5, 0.8)
    ]
    assert best == sorted(best, reverse=True)
    assert best[0] == 8
    assert best[-1] == 0


def test_speculation_stops_paying_at_a_batch_that_rises_with_acceptance() -> None:
    limits = []
    for acceptance in (0.3, 0.5, 0.7):
        options = PlanOptions(
            acceptance=(acceptance,), model=DENSE_70B, num_gpus=4, context_tokens=0
        )
        limit = stops_paying_at(options)
        assert limit is not None
        assert best_of(rows_of(options, limit)).draft_length == 0
        assert best_of(rows_of(options, limit - 1)).draft_length > 0
        limits.append(limit)
    assert limits == sorted(set(limits))


def test_measured_times_are_of_one_batch() -> None:
    plan = make_plan(PlanOptions(probe=probed(0.1), batches=(4, 8)))
    assert list(plan.best) == [4]
    assert plan.stops_paying_at is None


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    arguments = ["plan", "--acceptance", "0.8,0.6", "--batch", "1,512"]
    result = CliRunner().invoke(app, [*arguments, "--output", str(path)])
    assert result.exit_code == 0, result.output
    assert "batch 1: best K" in result.stdout
    assert "Assumed:" in result.stdout
    written = json.loads(path.read_text())
    assert set(written["best"]) == {"1", "512"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--acceptance", "1.2"], "acceptance: 1.2 is not allowed; must be numbers"),
        (["--acceptance", "x"], "acceptance: 'x' is not allowed"),
        (["--max-draft-length", "17"], "max-draft-length: 17 is not allowed"),
        (["--hardware", "tpu"], "hardware: 'tpu' is not allowed; must be one of h100"),
        (["--model", "gpt"], "model: 'gpt' is not allowed; must be one of dense-7b"),
        (["--num-gpus", "0"], "num-gpus: 0 is not allowed"),
        (["--batch", "0"], "batch: 0 is not allowed; must be numbers from 1 to 1024"),
        (["--context", "-1"], "context-tokens: -1 is not allowed"),
        (["--output", "/nowhere/plan.json"], "must be a file in a folder that exists"),
    ],
)
def test_a_wrong_option_is_one_sentence(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
