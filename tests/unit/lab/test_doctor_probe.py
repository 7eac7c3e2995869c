"""What the doctor concludes from rounds that were played."""

from typing import Any

import pytest

from vllm_mtp.lab.doctor import _of_probe
from vllm_mtp.lab.doctor_probe import LENGTHS, conclude

STEP_S, DRAFT_STEP_S = 0.010, 0.001


def figures(draft_length: int, survival: list[float]) -> dict[str, Any]:
    steps = 200
    per_step = STEP_S * (1 + 0.05 * draft_length) + DRAFT_STEP_S * draft_length
    return {
        "num_drafts": steps if draft_length else 0,
        "accepted_per_position": [steps * s for s in survival[:draft_length]],
        "decode_seconds": steps * per_step,
        "decode_steps": steps,
        "decode_split_seconds": {"draft": steps * DRAFT_STEP_S * draft_length},
    }


def rounds(probability: float) -> dict[int, list[dict[str, Any]]]:
    survival = [probability**j for j in range(1, 9)]
    return {k: [figures(k, survival)] * 3 for k in LENGTHS}


def test_the_prediction_is_the_formula() -> None:
    result = conclude(rounds(0.8))
    assert result.survival == pytest.approx([0.8**j for j in range(1, 9)])
    assert result.draft_cost == pytest.approx(0.1)
    for each in result.lengths:
        k = each.draft_length
        length = (1 - 0.8 ** (k + 1)) / 0.2
        assert each.acceptance_length == pytest.approx(length)
        assert each.predicted_speedup == pytest.approx(length / (1 + 0.15 * k))
    assert result.best.draft_length == 5
    assert result.as_json()["best_draft_length"] == 5


def test_where_nothing_pays_it_says_so() -> None:
    result = conclude(rounds(0.14))
    assert result.best.draft_length == 0
    levels = {each.topic: each.level for each in _of_probe(result)}
    assert levels["prediction"] == "note"
    assert levels["acceptance"] == "ok"


def test_next_to_no_acceptance_is_a_problem() -> None:
    first = next(iter(_of_probe(conclude(rounds(0.02)))))
    assert first.level == "problem"
    assert "2.0% of first draft tokens" in first.text


def test_a_runner_that_cannot_be_split_has_no_draft_cost() -> None:
    unsplit = {
        k: [each | {"decode_split_seconds": None} for each in figures_of]
        for k, figures_of in rounds(0.5).items()
    }
    assert conclude(unsplit).draft_cost == 0.0
