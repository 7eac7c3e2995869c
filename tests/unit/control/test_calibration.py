"""The calibration error is that of the chances, and fades."""

import numpy as np
import pytest

from vllm_mtp.control.calibration import Calibration


def judge(calibration: Calibration, chance: float, truth: float, num: int) -> None:
    rng = np.random.default_rng(0)
    for accepted in (rng.random(num) < truth).tolist():
        calibration.note([chance], int(accepted))


def test_true_chances_have_no_error() -> None:
    calibration = Calibration()
    assert calibration.error is None
    for chance in (0.15, 0.55, 0.95):
        judge(calibration, chance, chance, 2000)
    assert calibration.error == pytest.approx(0.0, abs=0.02)


def test_wrong_chances_have_the_error_that_they_have() -> None:
    calibration = Calibration()
    judge(calibration, 0.85, 0.6, 4000)
    assert calibration.error == pytest.approx(0.25, abs=0.02)


def test_errors_of_opposite_sign_do_not_cancel() -> None:
    calibration = Calibration()
    judge(calibration, 0.25, 0.45, 2000)
    judge(calibration, 0.75, 0.55, 2000)
    assert calibration.error == pytest.approx(0.2, abs=0.03)


def test_the_past_fades() -> None:
    calibration = Calibration()
    judge(calibration, 0.9, 0.1, 8000)
    judge(calibration, 0.9, 0.9, 60000)
    assert calibration.error == pytest.approx(0.0, abs=0.03)


def test_a_draft_counts_token_by_token_for_all_its_requests() -> None:
    calibration = Calibration()
    calibration.note([0.95, 0.95, 0.05], 2, num_requests=10)
    assert calibration.error == pytest.approx(0.05)
