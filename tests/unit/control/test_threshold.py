"""The classic rule: below 60 % running acceptance toward one, above it upward."""

import random

import pytest

from vllm_mtp.control.threshold import ThresholdController
from vllm_mtp.records import DecodeRequest, RequestOutcome, StepOutcome

K_MAX = 5


def observe(controller: ThresholdController, drafted: int, accepted: int) -> None:
    controller.observe(
        StepOutcome((RequestOutcome("r", drafted, accepted),), 1, 1 + drafted, 0.01)
    )


def run(probability: float, num_steps: int = 300) -> list[int]:
    """Draft lengths of a request that accepts with ``probability``."""
    controller, rng = ThresholdController(K_MAX), random.Random(1)
    lengths = []
    for _ in range(num_steps):
        drafted = controller.decide([DecodeRequest("r", 0)]).num_draft_tokens["r"]
        accepted = 0
        while accepted < drafted and rng.random() < probability:
            accepted += 1
        observe(controller, drafted, accepted)
        lengths.append(drafted)
    return lengths


def test_low_acceptance_ends_at_one_and_never_at_zero() -> None:
    lengths = run(0.1)
    assert lengths[0] == K_MAX
    assert set(lengths[60:]) == {1}


def test_high_acceptance_stays_at_the_bound() -> None:
    assert set(run(0.98)) == {K_MAX}


def test_it_recovers() -> None:
    controller = ThresholdController(K_MAX)
    for _ in range(100):
        observe(controller, 3, 0)
    assert controller.draft_length == 1
    for _ in range(100):
        observe(controller, 1, 1)
    assert controller.draft_length == K_MAX


def test_it_moves_one_at_a_time_and_lets_the_mean_settle() -> None:
    controller = ThresholdController(K_MAX, steps_between_moves=8)
    lengths = []
    for _ in range(40):
        observe(controller, 3, 0)
        lengths.append(controller.draft_length)
    assert lengths[:7] == [5] * 7
    assert [lengths[i] for i in (7, 15, 23, 31, 39)] == [4, 3, 2, 1, 1]


@pytest.mark.parametrize(("threshold", "direction"), [(0.4, 1), (0.6, -1)])
def test_the_threshold_decides_about_the_direction(
    threshold: float, direction: int
) -> None:
    controller = ThresholdController(K_MAX, threshold, steps_between_moves=1)
    controller.draft_length = 3
    observe(controller, 2, 1)
    assert controller.draft_length == 3 + direction


def test_steps_without_drafts_teach_nothing() -> None:
    controller = ThresholdController(K_MAX, steps_between_moves=1)
    for _ in range(50):
        controller.observe(StepOutcome((), 4, 4, 0.01))
    assert controller.draft_length == K_MAX
