"""What the doctor concludes from rounds that were played."""

from typing import Any

import pytest

from vllm_mtp.tools.doctor import _of_probe
from vllm_mtp.tools.doctor_probe import LENGTHS, conclude

STEP_S, DRAFT_STEP_S = 0.010, 0.001


def figures(draft_length: int, survival: list[float]) -> dict[str, Any]:
    steps = 200
    per_step = STEP_S * (1 + 0.05 * draft_length) + DRAFT_STEP_S * draft_length
    return {
        "num_drafts": steps if draft_length else 0,
        "accepted_per_position": [steps * s for s in survival[:draft_length]],
        "decode_seconds": steps * per_step,
        "decode_steps": steps,
        "draft_seconds": steps * DRAFT_STEP_S * draft_length,
    }


def rounds(probability: float) -> dict[int, list[dict[str, Any]]]:
    survival = [probability**j for j in range(1, 9)]
    return {k: [figures(k, survival)] * 3 for k in LENGTHS}


def test_the_prediction_is_the_formula() -> None:
    result = conclude(rounds(0.8), [])
    assert result.survival == pytest.approx([0.8**j for j in range(1, 9)])
    assert result.draft_cost == pytest.approx(0.1)
    for each in result.lengths:
        k = each.draft_length
        length = (1 - 0.8 ** (k + 1)) / 0.2
        assert each.acceptance_length == pytest.approx(length)
        assert each.predicted_speedup == pytest.approx(length / (1 + 0.15 * k))
    # 2.108 at 5, 2.101 at 4: no difference that a probe would show.
    assert result.best.draft_length == 4
    assert result.as_json()["best_draft_length"] == 4


def test_where_nothing_pays_it_says_so() -> None:
    result = conclude(rounds(0.14), [])
    assert result.best.draft_length == 0
    levels = {each.topic: each.level for each in _of_probe(result)}
    assert levels["prediction"] == "note"
    assert levels["acceptance"] == "ok"


def test_next_to_no_acceptance_is_a_problem() -> None:
    first = next(iter(_of_probe(conclude(rounds(0.02), []))))
    assert first.level == "problem"
    assert "2.0% of first draft tokens" in first.text


def test_a_runner_that_cannot_be_split_has_no_draft_cost() -> None:
    unsplit = {
        k: [each | {"draft_seconds": None} for each in figures_of]
        for k, figures_of in rounds(0.5).items()
    }
    assert conclude(unsplit, []).draft_cost == 0.0


def test_survival_is_of_all_rounds_with_the_longest_drafts() -> None:
    """Of the prompts that have no step times, too."""
    others = [figures(8, [0.4**j for j in range(1, 9)])] * 9
    result = conclude(rounds(0.8), others)
    assert result.num_drafts == 3 * 200 + 9 * 200
    assert result.survival[0] == pytest.approx((3 * 0.8 + 9 * 0.4) / 12)


def test_the_interval_says_how_much_prompts_differ() -> None:
    """Some of them accept nothing."""
    good = figures(8, [0.8**j for j in range(1, 9)])
    bad = figures(8, [0.0] * 8)
    few = conclude(rounds(0.8), [good, bad] * 3).best
    many = conclude(rounds(0.8), [good, bad] * 30).best
    assert few.interval.lower < few.predicted_speedup < few.interval.upper
    widths = [each.interval.upper - each.interval.lower for each in (few, many)]
    # With 9 and 63 rounds: as 1 to the root of 7, and step times do not vary here.
    assert widths[1] < 0.5 * widths[0]
    same = conclude(rounds(0.8), [good] * 9).best
    assert same.interval == pytest.approx((same.predicted_speedup,) * 2)


def test_the_interval_says_how_much_step_times_differ() -> None:
    played = rounds(0.8)
    played[5] = [
        each | {"decode_seconds": each["decode_seconds"] * factor}
        for each, factor in zip(played[5], (0.8, 1.0, 1.3), strict=True)
    ]
    by_length = {each.draft_length: each for each in conclude(played, []).lengths}
    assert by_length[5].interval.upper / by_length[5].interval.lower > 1.5
    assert by_length[4].interval.upper / by_length[4].interval.lower < 1.01
