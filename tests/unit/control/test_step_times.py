"""The Kalman filter against Bayesian linear regression in closed form."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_mtp.control.step_times import (
    CostPrior,
    Layout,
    StepTimes,
    moved,
    prior_shape,
)

LAYOUT = Layout(3)
SHAPE = prior_shape(LAYOUT, CostPrior())

DEPTHS = st.integers(0, 3)
FEATURES = st.one_of(
    st.builds(LAYOUT.uniform, st.integers(0, 3), DEPTHS),
    st.builds(LAYOUT.mixed, st.floats(0, 3), DEPTHS),
)
STEPS = st.lists(
    st.tuples(FEATURES, st.floats(0.5, 4.0), st.floats(0.01, 0.3)), max_size=12
)


@settings(max_examples=50, deadline=None)
@given(STEPS)
def test_step_by_step_it_learns_what_all_steps_together_say(
    steps: list[tuple[list[float], float, float]],
) -> None:
    times = StepTimes(SHAPE)
    precision = np.linalg.inv(np.array(SHAPE.covariance))
    weighted = precision @ np.array(SHAPE.mean)
    for features, relative, noise in steps:
        times.learn(features, relative, noise)
        row = np.array(features)
        precision += np.outer(row, row) / noise**2
        weighted += row * relative / noise**2
    mean = np.linalg.solve(precision, weighted)
    np.testing.assert_allclose(times.mean, mean, rtol=1e-5, atol=1e-6)
    covariance = np.linalg.inv(precision)
    np.testing.assert_allclose(times.covariance, covariance, rtol=1e-4, atol=1e-7)


def test_the_prior_is_a_covariance_and_rows_cost_something() -> None:
    covariance = np.array(SHAPE.covariance)
    np.testing.assert_allclose(covariance, covariance.T)
    assert np.linalg.eigvalsh(covariance).min() > 0
    times = StepTimes(SHAPE)
    expected = [times.relative(LAYOUT.uniform(k, k)).seconds for k in range(4)]
    assert expected[0] == 1.0
    assert expected == sorted(expected)


MEANS = st.lists(st.floats(0.05, 20.0), min_size=LAYOUT.size, max_size=LAYOUT.size)


@given(MEANS)
def test_beliefs_that_move_to_the_same_size_stay(mean: list[float]) -> None:
    assert moved(mean, LAYOUT, 1.0) == pytest.approx(mean)


@given(MEANS, st.floats(1e-4, 1e4))
@example([3.0, 1.0, 1.0, 0.25, *[1.0] * 6, 8.0, *[1.0] * 3], 4.0)
def test_beliefs_that_move_stay_times_and_do_not_explode(
    mean: list[float], ratio: float
) -> None:
    there = moved(mean, LAYOUT, ratio)
    assert len(there) == LAYOUT.size
    assert min(there) > 0.0
    assert there[0] == pytest.approx(max(mean[0], 0.05), rel=1e-3)
    steepest = max(mean) * 4 * (1 + 3) / 0.3
    assert max(there[: LAYOUT.num_tiers]) <= steepest
    assert there[-3:] == mean[-3:]


def test_a_batch_of_twice_the_size_has_twice_the_rows() -> None:
    times = [1.0 + 0.5 * tokens for tokens, _ in LAYOUT.draft_tokens()]
    there = moved([*times, 0.1, 0.2, 0.3], LAYOUT, 2.0)
    rows = [2.0 * (1.0 + tokens) for tokens, _ in LAYOUT.draft_tokens()]
    assert there[:-3] == pytest.approx([(1.0 + 0.5 * (r - 1.0)) / 1.5 for r in rows])
    assert there[-3:] == [0.1, 0.2, 0.3]


def test_layouts_name_every_entry_once() -> None:
    assert LAYOUT.size == len(SHAPE.mean) == len(SHAPE.covariance)
    tiers = LAYOUT.draft_tokens()
    assert len(tiers) == LAYOUT.num_tiers
    for index, (tokens, is_mixed) in enumerate(tiers):
        features = (
            LAYOUT.mixed(tokens, 0) if is_mixed else LAYOUT.uniform(int(tokens), 0)
        )
        assert features == [float(i == index) for i in range(LAYOUT.size)]


@settings(deadline=None)
@given(st.floats(0, 3), DEPTHS)
def test_mixed_batches_lie_between_two_neighbouring_tiers(
    tokens: float, depth: int
) -> None:
    features = LAYOUT.mixed(tokens, depth)
    tiers = LAYOUT.draft_tokens()
    used = {i: f for i, f in enumerate(features[:-3]) if f}
    assert sum(used.values()) == pytest.approx(1.0)
    assert sum(f * tiers[i][0] for i, f in used.items()) == pytest.approx(tokens)
    assert max(used) - min(used) <= 1
    assert all(tiers[i][1] for i in used)
    assert features[-3:] == [0.0, float(depth > 0), float(depth)]


def test_a_visit_tells_most_about_its_own_tier_and_something_about_the_next() -> None:
    times = StepTimes(SHAPE)
    before = [times.relative(LAYOUT.uniform(k, 0)) for k in range(4)]
    for _ in range(50):
        times.learn(LAYOUT.uniform(2, 0), 2.0, 0.05)
    after = [times.relative(LAYOUT.uniform(k, 0)) for k in range(4)]
    moved = [b.seconds - a.seconds for a, b in zip(before, after, strict=True)]
    assert after[2].seconds == pytest.approx(2.0, abs=0.02)
    assert moved[2] > moved[1] > moved[0] > 0
    doubts = [estimate.deviation for estimate in after]
    assert doubts[2] < 0.02 < min(doubts[1], doubts[3])


def test_time_makes_everything_uncertain_but_not_more_than_at_first() -> None:
    times = StepTimes(SHAPE)
    features = LAYOUT.uniform(1, 1)
    first = times.relative(features).deviation
    for _ in range(50):
        times.learn(features, 1.13, 0.05)
    known = times.relative(features).deviation
    times.age(SHAPE, 0.5, 0.0)
    half = times.relative(features).deviation
    times.age(SHAPE, 1.0, 0.0)
    assert known < half < first
    assert times.relative(features).deviation == pytest.approx(first, rel=0.05)


def test_a_change_of_the_level_leaves_ratios_known() -> None:
    """What makes everything slower is learned from one kind of step for all."""
    times = StepTimes(SHAPE)
    for _ in range(100):
        for k in range(4):
            times.learn(LAYOUT.uniform(k, k), 1.0 + 0.2 * k, 0.03)
    for _ in range(40):
        times.age(SHAPE, 0.0, 0.01)
        times.learn(LAYOUT.uniform(0, 0), 1.5, 0.03)
    slow = [times.relative(LAYOUT.uniform(k, k)).seconds for k in range(4)]
    assert slow[0] == pytest.approx(1.5, abs=0.03)
    ratios = [seconds / slow[0] for seconds in slow]
    assert ratios == pytest.approx([1.0, 1.2, 1.4, 1.6], abs=0.1)
