"""The alarm is quiet where nothing changes, and not where something does."""

import numpy as np
import pytest

from vllm_mtp.metrics.drift import (
    MIN_EXAMINED,
    RECENT_REQUESTS,
    WARM_UP_REQUESTS,
    DriftAlarm,
)


def traffic(
    rng: np.random.Generator, mean: float, num_requests: int, concentration: float = 8.0
) -> list[tuple[int, int]]:
    """Requests of one domain: lengths and rates of their own."""
    rates = rng.beta(mean * concentration, (1 - mean) * concentration, num_requests)
    lengths = rng.integers(MIN_EXAMINED, 120, num_requests)
    return list(
        zip(lengths.tolist(), rng.binomial(lengths, rates).tolist(), strict=True)
    )


def test_a_server_that_changes_nothing_raises_no_alarm_in_a_hundred_thousand() -> None:
    rng = np.random.default_rng(0)
    for mean in (0.4, 0.8):
        alarm = DriftAlarm()
        for request in traffic(rng, mean, 50_000):
            alarm.observe(*request)
        assert alarm.num_alarms == 0
        assert alarm.baseline == pytest.approx(mean, abs=0.05)


@pytest.mark.parametrize("after", [0.02, 0.3, 0.5])
def test_a_fall_is_told_once_within_a_window_and_names_causes(after: float) -> None:
    rng = np.random.default_rng(1)
    alarm = DriftAlarm()
    for request in traffic(rng, 0.8, 400):
        assert alarm.observe(*request) is None
    found = [alarm.observe(*request) for request in traffic(rng, after, 400)]
    warnings = [(i, text) for i, text in enumerate(found) if text is not None]
    ((index, text),) = warnings
    assert index <= RECENT_REQUESTS
    assert "weights of the target that were updated" in text
    assert alarm.is_raised
    assert alarm.baseline == pytest.approx(0.8, abs=0.05), "deaf while it is raised"


def test_it_ends_when_acceptance_is_back() -> None:
    rng = np.random.default_rng(2)
    alarm = DriftAlarm()
    for mean, is_raised in ((0.8, False), (0.4, True), (0.8, False)):
        for request in traffic(rng, mean, 300):
            alarm.observe(*request)
        assert alarm.is_raised is is_raised


def test_short_requests_and_the_first_ones_say_nothing() -> None:
    alarm = DriftAlarm()
    for _ in range(1000):
        alarm.observe(MIN_EXAMINED - 1, 0)
    assert alarm.recent is None
    for _ in range(WARM_UP_REQUESTS):
        alarm.observe(50, 40)
    assert alarm.baseline is None
    for _ in range(RECENT_REQUESTS):
        alarm.observe(50, 40)
    assert alarm.baseline == pytest.approx(0.8)


@pytest.mark.parametrize(
    "changes",
    [
        [{"target"}],
        [{"target", "draft"}],
        [{"draft"}, {"target"}],
        [{"target"}, {"draft"}],
    ],
)
def test_new_weights_of_the_target_alone_are_named(changes: list[set[str]]) -> None:
    rng = np.random.default_rng(3)
    alarm = DriftAlarm()
    for request in traffic(rng, 0.8, 400):
        alarm.observe(*request)
    for changed in changes:
        alarm.weights_changed(changed)
    found = [alarm.observe(*request) for request in traffic(rng, 0.3, 400)]
    warnings = [text for text in found if text is not None]
    if "draft" in set().union(*changes):  # of others than the past is about
        assert not warnings
        assert alarm.baseline == pytest.approx(0.3, abs=0.05)
    else:
        (text,) = warnings
        assert "those of its MTP layers were not" in text
