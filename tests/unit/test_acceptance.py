"""Acceptance math against the closed-form table and against itself."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, binomtest

from vllm_mtp.acceptance import (
    break_even_probability,
    conditional_acceptance,
    expected_acceptance_length,
    geometric_acceptance_length,
    log_odds,
    logistic,
    speedup,
    survival,
    wilson_interval,
)

PROBABILITIES = st.floats(0, 1)


@pytest.mark.parametrize(
    ("probability", "draft_length", "expected"),
    [
        (0.8, 1, 1.80),
        (0.8, 2, 2.44),
        (0.8, 3, 2.95),
        (0.8, 4, 3.36),
        (0.5, 3, 1.88),
        (0.9, 3, 3.44),
        (0.0, 5, 1.0),
        (1.0, 5, 6.0),
    ],
)
def test_acceptance_lengths_of_the_closed_form_table(
    probability: float, draft_length: int, expected: float
) -> None:
    found = geometric_acceptance_length(probability, draft_length)
    assert found == pytest.approx(expected, abs=0.005)


@settings(deadline=None)
@given(PROBABILITIES, st.integers(0, 16))
def test_the_closed_form_is_the_sum_over_survival(
    probability: float, draft_length: int
) -> None:
    summed = expected_acceptance_length(survival([probability] * draft_length))
    closed = geometric_acceptance_length(probability, draft_length)
    assert closed == pytest.approx(summed, rel=1e-6)


def test_published_survival_gives_the_published_acceptance_length() -> None:
    # FastMTP, arXiv 2509.18362, plain MTP layer.
    published = [0.70, 0.11, 0.02]
    assert expected_acceptance_length(published) == pytest.approx(1.83)
    assert expected_acceptance_length(published, 1) == pytest.approx(1.70)
    assert expected_acceptance_length(published, 0) == 1.0


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=16))
def test_survival_never_rises_and_gives_back_the_conditional_acceptance(
    conditional: list[float],
) -> None:
    survived = survival(conditional)
    pairs = itertools.pairwise(survived)
    assert all(later <= earlier for earlier, later in pairs)
    assert conditional_acceptance(survived) == pytest.approx(conditional)


def test_after_a_position_that_nothing_survives_nothing_is_accepted() -> None:
    assert conditional_acceptance([0.5, 0.0, 0.0]) == [0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("probability", "draft_length"), [(-0.1, 3), (1.1, 3), (math.nan, 3), (0.5, -1)]
)
def test_what_is_no_probability_or_no_draft_length_is_refused(
    probability: float, draft_length: int
) -> None:
    with pytest.raises(ValueError, match="expected"):
        geometric_acceptance_length(probability, draft_length)


@settings(deadline=None)
@given(st.integers(1, 16), st.floats(0.05, 20))
def test_at_break_even_speculation_neither_gains_nor_loses(
    draft_length: int, relative_time: float
) -> None:
    probability = break_even_probability(draft_length, relative_time)
    if relative_time > draft_length + 1:
        assert probability is None
        return
    assert probability is not None
    gained = speedup(
        geometric_acceptance_length(probability, draft_length), relative_time
    )
    if relative_time <= 1.0:
        assert probability == 0.0
        assert gained >= 1.0
    else:
        assert gained == pytest.approx(1.0, abs=1e-5)


def test_break_even_of_one_draft_token_is_its_price() -> None:
    # 1 + p tokens in the time of 1.3 steps.
    assert break_even_probability(1, 1.3) == pytest.approx(0.3)
    assert break_even_probability(2, 1 + 0.5 + 0.25) == pytest.approx(0.5)
    assert break_even_probability(3, 4.0) == pytest.approx(1.0)
    assert break_even_probability(3, 4.01) is None


def test_a_dearer_step_needs_more_acceptance() -> None:
    needed = [break_even_probability(3, time) for time in (1.24, 1.54, 2.14)]
    assert needed == sorted(needed, key=float)
    assert needed[0] == pytest.approx(0.20, abs=0.01)


def test_a_step_without_time_has_no_speedup() -> None:
    with pytest.raises(ValueError, match="relative_step_time"):
        speedup(2.0, 0.0)


def test_the_interval_is_the_one_of_the_textbook() -> None:
    # Newcombe 1998, table I: 81 of 263 and 0 of 20.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


@given(st.integers(1, 5000), st.data())
def test_the_interval_is_scipys(drafted: int, data: st.DataObject) -> None:
    accepted = data.draw(st.integers(0, drafted))
    expected = binomtest(accepted, drafted).proportion_ci(method="wilson")
    assert wilson_interval(accepted, drafted) == pytest.approx(
        (expected.low, expected.high), abs=1e-9
    )


@pytest.mark.parametrize("drafted", [20, 100, 1000])
def test_the_interval_holds_the_truth_as_often_as_it_says(drafted: int) -> None:
    accepted = range(drafted + 1)
    intervals = [wilson_interval(a, drafted) for a in accepted]
    truths = [t / 200 for t in range(10, 191)]
    coverage = [
        sum(
            float(chance)
            for chance, interval in zip(
                binom.pmf(accepted, drafted, truth), intervals, strict=True
            )
            if interval.lower <= truth <= interval.upper
        )
        for truth in truths
    ]
    # Wilson's interval is right on average; at single probabilities it wavers.
    assert sum(coverage) / len(coverage) == pytest.approx(0.95, abs=0.01)
    assert min(coverage) > 0.90


def test_without_drafts_the_interval_is_everything() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)


@settings(deadline=None)
@given(st.integers(1, 10_000), PROBABILITIES)
def test_the_interval_holds_the_share_and_shrinks_with_drafts(
    drafted: int, share: float
) -> None:
    narrow = wilson_interval(share * 4 * drafted, 4 * drafted)
    wide = wilson_interval(share * drafted, drafted)
    assert 0 <= wide.lower <= share + 1e-9
    assert share - 1e-9 <= wide.upper <= 1
    assert narrow.upper - narrow.lower < wide.upper - wide.lower


@settings(deadline=None)
@given(st.floats(-13, 13))
def test_log_odds_and_logistic_undo_each_other(logit: float) -> None:
    assert log_odds(logistic(logit)) == pytest.approx(logit, abs=1e-6)


@pytest.mark.parametrize("logit", [-1e9, -800.0, 0.0, 800.0, 1e9])
def test_logistic_takes_any_number(logit: float) -> None:
    assert 0.0 <= logistic(logit) <= 1.0
    assert logistic(logit) + logistic(-logit) == pytest.approx(1.0)


def test_log_odds_keep_away_from_infinity() -> None:
    assert log_odds(0.0) == pytest.approx(-13.8155, abs=1e-3)
    assert log_odds(1.0) == pytest.approx(13.8155, abs=1e-3)
