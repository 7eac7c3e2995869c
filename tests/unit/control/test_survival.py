"""Survival estimates against truths that are drawn from."""

import random
import statistics
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mtp.control import survival
from vllm_mtp.control.acceptance_classes import cell_of, class_of, shift_of_class
from vllm_mtp.control.survival import HALF_LIFE_STEPS, SurvivalModel
from vllm_mtp.records import DecodeRequest, RequestOutcome

TRUTH = [0.85, 0.6, 0.5, 0.4]
"""Conditional acceptance by position."""
K_MAX = len(TRUTH)


def survived(conditional: Sequence[float]) -> list[float]:
    return list(accumulate(conditional, mul))


def survival_of(model: SurvivalModel, name: str = "new") -> list[float]:
    """Of a free greedy request with a short context."""
    return model.survival_of_class(model.see(DecodeRequest(name, 100)))


def draw(conditional: Sequence[float], draft_length: int, rng: random.Random) -> int:
    """Accepted draft tokens."""
    accepted = 0
    while accepted < draft_length and rng.random() < conditional[accepted]:
        accepted += 1
    return accepted


def teach(
    model: SurvivalModel,
    truths: dict[str, Sequence[float]],
    num_steps: int,
    rng: random.Random,
    draft_length: int = K_MAX,
) -> None:
    """Draft for every request in every step."""
    for request_id in truths:
        model.see(DecodeRequest(request_id, 100))
    for _ in range(num_steps):
        model.observe(
            [
                RequestOutcome(i, draft_length, draw(truth, draft_length, rng))
                for i, truth in truths.items()
            ]
        )


def test_the_running_mean_comes_close_to_the_truth() -> None:
    model = SurvivalModel(K_MAX)
    rng = random.Random(3)
    teach(model, {f"r{i}": TRUTH for i in range(32)}, 300, rng)
    assert survival_of(model) == pytest.approx(survived(TRUTH), abs=0.06)


def test_a_request_is_shrunk_toward_the_others_until_it_has_shown_itself() -> None:
    model = SurvivalModel(K_MAX)
    rng = random.Random(2)
    crowd = {f"r{i}": [0.8] * K_MAX for i in range(20)}
    teach(model, crowd, 100, rng)
    mean = survival_of(model)[0]
    assert mean == pytest.approx(0.8, abs=0.05)
    estimates = []
    for num_rejected in (1, 15, 80):
        model.keep_only(crowd)
        model.see(DecodeRequest("odd", 100))
        for _ in range(num_rejected):
            model.observe(
                [
                    RequestOutcome("odd", 1, 0),
                    *(RequestOutcome(i, 1, rng.random() < 0.8) for i in crowd),
                ]
            )
        estimates.append(survival_of(model, "odd")[0])
    little, more, much = estimates
    assert little > more > much
    assert little == pytest.approx(mean, abs=0.15)
    assert much < 0.45
    assert min(survival_of(model, i)[0] for i in crowd) > much + 0.15


def test_what_was_not_reached_says_nothing() -> None:
    """Rejected at position 1: positions 2, 3, 4 were not examined."""
    one, four = SurvivalModel(K_MAX), SurvivalModel(K_MAX)
    for _ in range(20):
        one.observe([RequestOutcome("r", 1, 0)])
        four.observe([RequestOutcome("r", 4, 0)])
    assert survival_of(four, "r") == survival_of(one, "r")


def test_the_draft_length_does_not_bias_the_estimate() -> None:
    """Acceptance per drafted token would fall with K; survival does not."""
    found = []
    for draft_length in (1, 2, 4):
        model = SurvivalModel(K_MAX)
        truths = {f"r{i}": [0.7] * K_MAX for i in range(32)}
        teach(model, truths, 300, random.Random(4), draft_length)
        found.append(survival_of(model)[0])
    assert found == pytest.approx([0.7] * 3, abs=0.05)


def test_what_is_not_seen_becomes_uncertain_and_keeps_its_mean() -> None:
    model = SurvivalModel(K_MAX)
    teach(model, {f"r{i}": TRUTH for i in range(8)}, 200, random.Random(1))
    before = survival_of(model)
    spreads = []
    for _ in range(2):
        rng = random.Random(0)
        class_id = model.see(DecodeRequest("new", 100))
        samples = [
            model.survival_of_class(class_id, model.draw(rng, []))[0]
            for _ in range(400)
        ]
        spreads.append(statistics.stdev(samples))
        assert statistics.fmean(samples) == pytest.approx(before[0], abs=0.1)
        model.wait(round(8 * HALF_LIFE_STEPS))
    assert spreads[1] > 4 * spreads[0]
    assert survival_of(model) == before


def test_a_request_that_was_not_drafted_for_returns_to_the_mean() -> None:
    """Its text has gone on meanwhile; steps count, not drafts."""
    model, rng = SurvivalModel(1), random.Random(2)
    crowd = {f"r{i}": [0.8] for i in range(20)}
    teach(model, {**crowd, "odd": [0.1]}, 200, rng, 1)
    odd = survival_of(model, "odd")[0]
    assert odd < 0.45
    teach(model, crowd, 400, rng, 1)
    model.observe([RequestOutcome("odd", 1, 1)])
    assert survival_of(model, "odd")[0] > 0.7


def test_an_abrupt_change_is_noticed_within_a_few_steps() -> None:
    model = SurvivalModel(K_MAX)
    rng = random.Random(7)
    teach(model, {f"r{i}": [0.85] * K_MAX for i in range(16)}, 200, rng)
    teach(model, {f"r{i}": [0.05] * K_MAX for i in range(16)}, 8, rng)
    assert survival_of(model)[0] < 0.3
    teach(model, {f"r{i}": [0.85] * K_MAX for i in range(16)}, 12, rng)
    assert survival_of(model)[0] > 0.6


def test_many_requests_at_once_do_not_overshoot() -> None:
    """Far from the truth the gradient of their likelihood is no line."""
    model, rng = SurvivalModel(1), random.Random(1)
    contexts = [100, 1000, 5000, 20_000, 100_000]
    requests = [DecodeRequest(f"r{i}", contexts[i % 5], i % 2 == 0) for i in range(200)]
    for truth in (0.02, 0.5, 0.02, 0.9, 0.5):
        for request in requests:
            model.see(request)
        for step in range(60):
            model.observe(
                [
                    RequestOutcome(r.request_id, 1, rng.random() < truth)
                    for r in requests
                ]
            )
            if step > 20:
                believed = statistics.fmean(
                    model.survival_of_class(model.class_of[r.request_id])[0]
                    for r in requests
                )
                assert believed == pytest.approx(truth, abs=0.15), (truth, step)


def test_greedy_and_sampled_requests_are_told_apart() -> None:
    model = SurvivalModel(K_MAX)
    rng = random.Random(8)
    truths = {True: 0.9, False: 0.35}
    for is_greedy in truths:
        for i in range(8):
            model.see(DecodeRequest(f"{is_greedy}{i}", 100, is_greedy))
    for _ in range(300):
        model.observe(
            [
                RequestOutcome(f"{is_greedy}{i}", 2, draw([p, p], 2, rng))
                for is_greedy, p in truths.items()
                for i in range(8)
            ]
        )
    for is_greedy, probability in truths.items():
        class_id = model.see(DecodeRequest("new", 100, is_greedy))
        found = model.survival_of_class(class_id)[0]
        assert found == pytest.approx(probability, abs=0.08)


FREE, CONSTRAINED = 0.8, 0.3


def test_what_constrained_requests_accept_is_not_believed_of_others() -> None:
    rng, model = random.Random(4), SurvivalModel(K_MAX)
    for turn in range(24):
        is_constrained = turn % 2 == 1
        truth = CONSTRAINED if is_constrained else FREE
        request = DecodeRequest(f"r{turn}", 100, is_constrained=is_constrained)
        for _ in range(50):
            model.see(request)
            accepted = draw([truth] * 2, 2, rng)
            model.observe([RequestOutcome(request.request_id, 2, accepted)])
    free, constrained = (
        model.survival_of_class(
            model.see(DecodeRequest(f"new{i}", 100, is_constrained=bool(i)))
        )[0]
        for i in range(2)
    )
    assert free > constrained + 0.25


def test_a_large_batch_is_sampled_in_turn_so_that_nobody_is_left_out() -> None:
    model = SurvivalModel(1)
    names = [f"r{i}" for i in range(35)]
    before = [survival_of(model, name)[0] for name in names]
    assert len(set(before)) == 1
    for _ in range(80):
        model.observe([RequestOutcome(n, 1, i % 2) for i, n in enumerate(names)], 1, 10)
    after = [survival_of(model, name)[0] for name in names]
    assert max(after[::2]) < min(after[1::2])


def test_requests_that_are_gone_are_forgotten() -> None:
    model = SurvivalModel(K_MAX)
    teach(model, {"old": [0.1] * K_MAX, "kept": [0.9] * K_MAX}, 100, random.Random(0))
    odd = survival_of(model, "old")
    model.keep_only(["kept"])
    assert set(model.class_of) == {"kept"}
    assert survival_of(model, "old")[0] > odd[0]


def test_a_class_is_a_cell_and_a_rounded_shift() -> None:
    cell = cell_of(DecodeRequest("r", 3000, False, is_constrained=True))
    for shift in (-9.0, -0.3, 0.0, 1.1, 9.0):
        rounded = shift_of_class(class_of(cell, shift))
        assert abs(rounded - min(max(shift, -5.0), 5.0)) <= 0.25
    kinds = {
        cell_of(DecodeRequest("r", 100, greedy, is_constrained=constrained))
        for greedy in (True, False)
        for constrained in (True, False)
    }
    assert kinds == {0, 1, 2, 3}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(
            st.tuples(
                st.sampled_from("abcdef"), st.integers(-2, 12), st.integers(-2, 12)
            ),
            max_size=6,
        ),
        max_size=30,
    )
)
def test_whatever_it_is_given_it_answers_with_probabilities(
    steps: list[list[tuple[str, int, int]]],
) -> None:
    """Unknown requests, more accepted than drafted, negative numbers."""
    model = SurvivalModel(K_MAX)
    for step in steps:
        model.observe([RequestOutcome(*each) for each in step])
    for name in "abz":
        found = [1.0, *survival_of(model, name)]
        assert all(0 <= low <= high for high, low in pairwise(found))
        sample = model.draw(random.Random(0), [name])
        sampled = model.survival_of_class(model.class_of[name], sample)
        assert all(0 <= probability <= 1 for probability in sampled)


@pytest.mark.parametrize("num_requests", [1, 6])
def test_steps_that_are_learned_together_teach_as_much(num_requests: int) -> None:
    """Also after a change: it may fall into the middle of them."""
    errors = [errors_alone_and_together(num_requests, seed) for seed in range(8)]
    alone, together = (statistics.fmean(each) for each in zip(*errors, strict=True))
    assert alone < 0.09
    assert together < alone + 0.02


def errors_alone_and_together(num_requests: int, seed: int) -> tuple[float, float]:
    """Of what is believed of a request's first token, 100 steps after a change on."""
    rng = random.Random(seed)
    ids = [f"r{i}" for i in range(num_requests)]
    alone, together = SurvivalModel(K_MAX), SurvivalModel(K_MAX)
    for model in (alone, together):
        teach(model, dict.fromkeys(ids, TRUTH), 0, rng)
    errors: list[tuple[float, float]] = []
    for truth in (TRUTH, [0.4] * K_MAX):
        waiting: list[RequestOutcome] = []
        for step in range(300):
            drafts = [RequestOutcome(i, K_MAX, draw(truth, K_MAX, rng)) for i in ids]
            alone.observe(drafts)
            waiting += drafts
            if step % 8 == 5:
                together.observe(waiting, 8)
                waiting.clear()
                first, second = (
                    abs(survival_of(model, "r0")[0] - truth[0])
                    for model in (alone, together)
                )
                if step > 100:
                    errors.append((first, second))
    first_errors, second_errors = zip(*errors, strict=True)
    return statistics.fmean(first_errors), statistics.fmean(second_errors)


def test_what_hardly_varies_is_no_surprise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alarms are false here: nearly none in 2,000 steps of a single request."""
    alarms = []
    doubt = SurvivalModel.doubt

    def count(self: SurvivalModel, cells: Sequence[int]) -> None:
        alarms.append(cells)
        doubt(self, cells)

    monkeypatch.setattr(survival.SurvivalModel, "doubt", count)
    model = SurvivalModel(K_MAX)
    teach(model, {"r": [0.9] * K_MAX}, 2000, random.Random(3))
    assert len(alarms) < 12


@pytest.mark.parametrize("has_imputed", [True, False])
def test_leaving_out_unlikely_drafts_does_not_bias_the_estimate(
    has_imputed: bool,
) -> None:
    """Half of the draft tokens are sure, half are not; the device verifies the sure."""
    model, rng, believed = SurvivalModel(1), random.Random(3), []
    for _ in range(2000):
        chance = rng.choice([0.95, 0.25])
        is_accepted = rng.random() < chance
        outcome = RequestOutcome("r", 1, int(is_accepted))
        if chance < 0.5:
            would_be = int(is_accepted) if has_imputed else 0
            outcome = RequestOutcome(
                "r", 0, 0, num_left_out=1, num_would_be_accepted=would_be
            )
        model.observe([outcome])
        believed.append(survival_of(model, "r")[0])
    error = statistics.mean(believed) - 0.6
    assert (abs(error) < 0.03) == has_imputed


def test_after_new_weights_levels_are_uncertain_again() -> None:
    model, rng = SurvivalModel(K_MAX), random.Random(5)
    teach(model, {"a": [0.2] * K_MAX}, 200, rng)

    def spread() -> float:
        return statistics.stdev(model.draw(rng, "a").common for _ in range(200))

    known, mean = spread(), survival_of(model)
    model.doubt()
    assert spread() > 2 * known
    assert survival_of(model) == mean
