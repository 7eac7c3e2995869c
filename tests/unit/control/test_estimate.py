"""What a controller says a step's parts took."""

import pytest

from vllm_mtp.control.goodput import GoodputController
from vllm_mtp.control.options import GoodputOptions
from vllm_mtp.records import DecodeRequest, RequestOutcome, StepOutcome

TARGET_S, ROW_S, DRAFT_S = 0.020, 0.001, 0.003
NUM_REQUESTS, K_MAX = 4, 4


def step(draft_length: int, depth: int) -> StepOutcome:
    """All requests verify alike; one of two draft tokens is accepted."""
    # The MTP layers pass over verified rows whether or not they draft.
    passes = depth or min(draft_length, 1)
    outcomes = tuple(
        RequestOutcome(f"r{i}", draft_length, draft_length // 2)
        for i in range(NUM_REQUESTS)
    )
    return StepOutcome(
        outcomes if draft_length else (),
        NUM_REQUESTS,
        NUM_REQUESTS * (1 + draft_length),
        TARGET_S + ROW_S * draft_length + DRAFT_S * passes,
        draft_depth=depth,
        num_decode_requests=NUM_REQUESTS,
        num_context_tokens=100 * NUM_REQUESTS,
    )


@pytest.fixture(scope="module")
def controller() -> GoodputController:
    """One that has seen every draft length often."""
    requests = [DecodeRequest(f"r{i}", 100) for i in range(NUM_REQUESTS)]
    found = GoodputController(K_MAX, GoodputOptions())
    for number in range(1000):
        found.decide(requests)
        length = number % (K_MAX + 1)
        found.observe(step(length, length))
        found.observe(step(length, 0))
    return found


@pytest.mark.parametrize("length", range(K_MAX + 1))
def test_the_parts_are_those_of_the_machine(
    controller: GoodputController, length: int
) -> None:
    known = controller.estimate(step(length, length))
    assert known is not None
    assert known.target_s == pytest.approx(TARGET_S, rel=0.1)
    assert known.verify_s == pytest.approx(ROW_S * length, abs=0.0015)
    assert known.draft_s == pytest.approx(DRAFT_S * length, abs=0.002)
    assert known.goodput > 0


def test_nothing_is_said_of_other_steps(controller: GoodputController) -> None:
    prefill = StepOutcome((), 1, 50, 0.1, num_prefill_tokens=50)
    assert controller.estimate(prefill) is None
    idle = StepOutcome((), 1, 1, 0.02)
    assert controller.estimate(idle) is None, "nobody decodes"
    alone = StepOutcome((), 1, 1, 0.02, num_decode_requests=1)
    assert controller.estimate(alone) is None, "planned for a batch of four"
    assert GoodputController(K_MAX).estimate(step(2, 2)) is None, "nothing is known"


def test_chances_that_are_true_are_found_calibrated(
    controller: GoodputController,
) -> None:
    """Whether a token is accepted depends on the draft length alone, which a chance
    by position cannot know; on the average it can be right."""
    assert GoodputController(K_MAX).calibration_error is None
    assert controller.calibration_error == pytest.approx(0.0, abs=0.12)
