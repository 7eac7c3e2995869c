"""The comparison of two samples: its false alarms and what it finds."""

import numpy as np
import pytest

from vllm_mtp.tools.verify_compare import (
    homogeneity_p_value,
    num_cells,
    smallest_shift,
)

SHARES = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
NUM_SAMPLES = 800


def draw(rng: np.random.Generator, shares: np.ndarray) -> list[int]:
    return rng.choice(len(shares), size=NUM_SAMPLES, p=shares).tolist()


def test_equal_samples_give_p_values_that_are_uniform() -> None:
    rng = np.random.default_rng(0)
    p_values = [
        homogeneity_p_value(draw(rng, SHARES), draw(rng, SHARES)) for _ in range(400)
    ]
    for limit in (0.05, 0.25, 0.5):
        share = np.mean(np.array(p_values) < limit)
        assert share == pytest.approx(limit, abs=4 * (limit / 400) ** 0.5)


def test_a_shift_of_the_stated_size_is_found_nine_times_in_ten() -> None:
    rng, alpha = np.random.default_rng(1), 1e-3
    first = draw(rng, SHARES)
    shift = smallest_shift(first, draw(rng, SHARES), alpha)
    assert 0.01 < shift < 0.2
    shifted = SHARES + shift * np.array([-1, 1, 0, 0, 0, 0])
    found = [
        homogeneity_p_value(draw(rng, SHARES), draw(rng, shifted)) < alpha
        for _ in range(300)
    ]
    assert np.mean(found) == pytest.approx(0.9, abs=0.06)


def test_more_samples_find_less() -> None:
    rng = np.random.default_rng(2)
    few, many = draw(rng, SHARES), draw(rng, SHARES) * 4
    assert smallest_shift(many, many, 1e-3) < 0.6 * smallest_shift(few, few, 1e-3)


def test_rare_outcomes_are_one() -> None:
    common = [0] * 50 + [1] * 50
    assert num_cells([*common, 2, 3], [*common, 4]) == 3
