"""The slope of acceptance over confidence is found, and what is unknown is damped."""

import random

import pytest

from vllm_mtp.acceptance import logistic
from vllm_mtp.control.confidence import ConfidenceModel
from vllm_mtp.control.survival import SurvivalModel
from vllm_mtp.records import DecodeRequest, RequestOutcome

K_MAX = 4


def draw_outcome(
    rng: random.Random, slope: float, request_id: str = "r"
) -> RequestOutcome:
    """All positions alike: log-odds 1.5 at confidence 1.5."""
    confidences = tuple(rng.uniform(0.0, 3.0) for _ in range(K_MAX))
    accepted = 0
    while accepted < K_MAX:
        log_odds = 1.5 + slope * (confidences[accepted] - 1.5)
        if rng.random() >= logistic(log_odds):
            break
        accepted += 1
    return RequestOutcome(request_id, K_MAX, accepted, confidences)


@pytest.mark.parametrize("slope", [0.0, 1.0, 2.5])
def test_the_slope_is_learned_from_what_was_accepted(slope: float) -> None:
    rng, model = random.Random(1), SurvivalModel(K_MAX)
    for step in range(1500):
        model.see(DecodeRequest(f"r{step // 50}", 100))
        model.observe([draw_outcome(rng, slope, f"r{step // 50}")])
    assert model.confidences[0].slope == pytest.approx(slope, abs=0.35)
    assert model.confidences[0].centres == pytest.approx([1.5] * K_MAX, abs=0.15)


def test_sampled_requests_have_a_slope_of_their_own() -> None:
    rng, model = random.Random(1), SurvivalModel(K_MAX)
    model.see(DecodeRequest("greedy", 100))
    model.see(DecodeRequest("sampled", 100, is_greedy=False))
    for _ in range(1500):
        pair = [draw_outcome(rng, 2.5, "greedy"), draw_outcome(rng, 0.5, "sampled")]
        model.observe(pair)
    greedy, sampled = (
        model.chances_of_class(model.class_of[i], K_MAX) for i in ("greedy", "sampled")
    )
    assert greedy.slope == pytest.approx(2.5, abs=0.4)
    assert sampled.slope == pytest.approx(0.5, abs=0.3)
    # Log-odds of 1.5 at a confidence of 1.5.
    assert greedy.log_odds[0] == pytest.approx(1.5 - 1.5 * 2.5, abs=0.6)
    assert sampled.log_odds[0] == pytest.approx(1.5 - 1.5 * 0.5, abs=0.4)


def test_survival_without_confidences_is_that_of_the_mean_draft() -> None:
    """Averaged over confidences, not taken at the usual one: the mean of a logistic."""
    rng, model = random.Random(2), SurvivalModel(K_MAX)
    outcomes = [draw_outcome(rng, 2.5) for _ in range(3000)]
    model.see(DecodeRequest("r", 100))
    for outcome in outcomes:
        model.observe([outcome])
    first = sum(o.num_accepted_tokens > 0 for o in outcomes) / len(outcomes)
    class_id = model.class_of["r"]
    assert model.survival_of_class(class_id)[0] == pytest.approx(first, abs=0.07)
    at_usual = logistic(model.log_odds_of_class(class_id)[0])
    assert at_usual > first + 0.03, "averaging matters"


def test_where_nothing_is_known_of_confidence_nothing_changes() -> None:
    with_field, without = SurvivalModel(K_MAX), SurvivalModel(K_MAX)
    rng = random.Random(3)
    for _ in range(200):
        outcome = draw_outcome(rng, 1.0)
        with_field.observe([outcome._replace(confidences=())])
        without.observe([RequestOutcome(*outcome[:3])])
    class_id = with_field.class_of["r"]
    assert with_field.survival_of_class(class_id) == without.survival_of_class(class_id)


def test_confidences_beyond_the_depth_and_without_bound_do_no_harm() -> None:
    model = ConfidenceModel(2)
    for _ in range(50):
        model.note((1e30, float("inf"), 1.0, 1.0))
        model.learn((0.5, 0.5), 2, (1e30, float("inf"), 1.0))
    assert model.offsets((1e30, 0.0, 7.0)) == pytest.approx([0.0, -4.0 * model.slope])


def verified(rng: random.Random, mean_confidence: float) -> RequestOutcome:
    """A first draft token; confidences are as skewed as real ones."""
    confidence = min(rng.expovariate(1.0 / mean_confidence), 12.0)
    is_accepted = rng.random() < logistic(1.2 * (confidence - 1.0))
    return RequestOutcome("r", 1, int(is_accepted), (confidence,))


@pytest.mark.parametrize("mean_confidence", [0.5, 1.0])
def test_what_is_expected_before_drafting_is_what_happens_after_a_change_too(
    mean_confidence: float,
) -> None:
    """Its centre and spread of confidences are those of before for long."""
    rng, model = random.Random(3), SurvivalModel(K_MAX)
    class_id = model.see(DecodeRequest("r", 100))
    for _ in range(2000):
        model.observe([verified(rng, 6.0)])
    errors = []
    for step in range(1200):
        outcome = verified(rng, mean_confidence)
        class_id = model.class_of["r"]
        expected = model.survival_of_class(class_id)[0]
        if step >= 200:
            errors.append(expected - outcome.num_accepted_tokens)
        model.observe([outcome])
    assert abs(sum(errors)) / len(errors) < 0.03
