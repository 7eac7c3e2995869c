"""Survival estimates against truths that are drawn from."""

import random
import statistics
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mtp.acceptance import log_odds, logistic
from vllm_mtp.control.profiles import Profiles, cell_of
from vllm_mtp.control.request_memory import Memory
from vllm_mtp.control.survival import SurvivalModel, SurvivalOptions
from vllm_mtp.records import DecodeRequest, RequestOutcome

TRUTH = [0.85, 0.6, 0.5, 0.4]
"""Conditional acceptance by position."""
K_MAX = len(TRUTH)


def survived(conditional: Sequence[float]) -> list[float]:
    return list(accumulate(conditional, mul))


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


def share_of_truths_held(z: float) -> float:
    """Engines of ten alike requests, each observed for 40 steps."""
    held = []
    for seed in range(60):
        model = SurvivalModel(K_MAX)
        teach(model, {f"r{i}": TRUTH for i in range(10)}, 40, random.Random(seed))
        intervals = model.intervals_of(DecodeRequest("r0", 100), z)
        held += [
            interval.lower <= true <= interval.upper
            for interval, true in zip(intervals, survived(TRUTH), strict=True)
        ]
    return sum(held) / len(held)


def test_intervals_hold_the_truth_at_least_as_often_as_they_say() -> None:
    """They also allow for a drift, which is not there: so rather more often."""
    assert share_of_truths_held(1.96) >= 0.95
    assert 0.68 <= share_of_truths_held(1.0) <= 0.92


def test_intervals_are_narrow_enough_to_be_of_use() -> None:
    model = SurvivalModel(K_MAX)
    teach(model, {"r": TRUTH}, 400, random.Random(1))
    interval = model.intervals_of(DecodeRequest("r", 100))[0]
    assert interval.upper - interval.lower < 0.3


def test_intervals_narrow_as_drafts_come_in() -> None:
    widths = []
    for num_steps in (0, 10, 100):
        model = SurvivalModel(K_MAX)
        teach(model, {"r": TRUTH}, num_steps, random.Random(1))
        first = model.intervals_of(DecodeRequest("r", 100))[0]
        widths.append(first.upper - first.lower)
    assert widths == sorted(widths, reverse=True)


def test_the_running_mean_comes_close_to_the_truth() -> None:
    model = SurvivalModel(K_MAX)
    rng = random.Random(3)
    teach(model, {f"r{i}": TRUTH for i in range(32)}, 300, rng)
    newcomer = model.survival_of(DecodeRequest("new", 100))
    assert newcomer == pytest.approx(survived(TRUTH), abs=0.06)


def test_a_request_is_shrunk_toward_the_others_until_it_has_shown_itself() -> None:
    model = SurvivalModel(K_MAX)
    rng = random.Random(2)
    crowd = {f"r{i}": [0.8] * K_MAX for i in range(20)}
    teach(model, crowd, 100, rng)
    mean = model.survival_of(DecodeRequest("new", 100))[0]
    assert mean == pytest.approx(0.8, abs=0.05)
    estimates = []
    for num_rejected in (1, 15, 80):
        model.see(DecodeRequest("odd", 100))
        model.keep_only(crowd)
        model.see(DecodeRequest("odd", 100))
        for _ in range(num_rejected):
            model.observe(
                [
                    RequestOutcome("odd", 1, 0),
                    *(RequestOutcome(i, 1, rng.random() < 0.8) for i in crowd),
                ]
            )
        estimates.append(model.survival_of(DecodeRequest("odd", 100))[0])
    little, more, much = estimates
    assert little > more > much
    assert little == pytest.approx(mean, abs=0.1)
    assert much < 0.45
    others = [model.survival_of(DecodeRequest(i, 100))[0] for i in crowd]
    assert min(others) > much + 0.2


def test_shrinkage_is_learned_from_the_spread_of_the_requests() -> None:
    variances = []
    for low, high in ((0.7, 0.7), (0.3, 0.95)):
        model = SurvivalModel(K_MAX)
        rng = random.Random(5)
        truths = {f"r{i}": [low if i % 2 else high] * K_MAX for i in range(40)}
        teach(model, truths, 200, rng)
        variances.append(model.shift_variance)
    alike, different = variances
    assert different > 3 * alike


def test_what_was_not_reached_says_nothing() -> None:
    """Rejected at position 1: positions 2, 3, 4 were not examined."""
    one, four = SurvivalModel(K_MAX), SurvivalModel(K_MAX)
    for _ in range(20):
        one.observe([RequestOutcome("r", 1, 0)])
        four.observe([RequestOutcome("r", 4, 0)])
    request = DecodeRequest("r", 0)
    assert four.survival_of(request) == one.survival_of(request)


def test_the_draft_length_does_not_bias_the_estimate() -> None:
    """Acceptance per drafted token would fall with K; survival does not."""
    found = []
    for draft_length in (1, 2, 4):
        model = SurvivalModel(K_MAX)
        truths = {f"r{i}": [0.7] * K_MAX for i in range(32)}
        teach(model, truths, 300, random.Random(4), draft_length)
        found.append(model.survival_of(DecodeRequest("new", 100))[0])
    assert found == pytest.approx([0.7] * 3, abs=0.05)


def test_half_of_what_is_known_of_a_request_is_new_after_the_stated_half_life() -> None:
    """Weak shrinkage and no drift: the request's own memory is what is left."""
    half_life = 48.0
    options = SurvivalOptions(
        memories=(Memory(half_life, 3.0, 3.0),), drift_variance=0.0, alarm_sigmas=1e9
    )
    model = SurvivalModel(1, options)
    crowd = [f"r{i}" for i in range(200)]
    model.see(DecodeRequest("r", 0))
    rng = random.Random(6)

    def step(accepted: bool) -> float:
        outcomes = [RequestOutcome(i, 1, rng.random() < 0.5) for i in crowd[:80]]
        model.observe([*outcomes, RequestOutcome("r", 1, accepted)])
        return model.survival_of(DecodeRequest("r", 0))[0]

    for number in range(600):
        before = step(number % 10 != 0)
    assert before > 0.75
    after = [step(number % 10 == 0) for number in range(300)]
    assert after[-1] < 0.25
    # 0.9 and 0.1 weigh the same when half is forgotten.
    crossing = next(i for i, estimate in enumerate(after) if estimate < 0.5)
    assert half_life / 2 < crossing < 2 * half_life


def surviving_after_three_acceptances(num_silent_steps: int) -> float:
    """Of a request of which little was accepted, before the others are silent, too."""
    model, rng = SurvivalModel(1, SurvivalOptions(alarm_sigmas=1e9)), random.Random(2)
    model.see(DecodeRequest("r", 0))
    for _ in range(300):
        model.observe([RequestOutcome("r", 1, rng.random() < 0.1)])
    model.wait(num_silent_steps)
    for _ in range(3):
        model.observe([RequestOutcome("r", 1, 1)])
    return model.survival_of(DecodeRequest("r", 0))[0]


def test_a_request_that_was_not_drafted_for_is_known_less_and_less() -> None:
    """Its text has gone on meanwhile; steps count, not drafts."""
    at_once, late = (surviving_after_three_acceptances(n) for n in (0, 500))
    assert at_once < 0.35
    assert late > at_once + 0.25


def test_an_abrupt_change_is_noticed_within_a_few_steps() -> None:
    model = SurvivalModel(K_MAX)
    rng = random.Random(7)
    teach(model, {f"r{i}": [0.85] * K_MAX for i in range(16)}, 200, rng)
    calm = model.num_alarms
    assert calm <= 2
    teach(model, {f"r{i}": [0.05] * K_MAX for i in range(16)}, 5, rng)
    assert model.num_alarms > calm
    assert model.survival_of(DecodeRequest("new", 100))[0] < 0.3


def test_contexts_and_regimes_are_told_apart() -> None:
    model = SurvivalModel(K_MAX)
    rng = random.Random(8)
    kinds = {
        "short": (100, True, 0.9),
        "long": (50_000, True, 0.6),
        "sampled": (100, False, 0.35),
    }
    for name, (context, is_greedy, _) in kinds.items():
        for i in range(8):
            model.see(DecodeRequest(f"{name}{i}", context, is_greedy))
    for _ in range(300):
        model.observe(
            [
                RequestOutcome(f"{name}{i}", 2, draw([p, p], 2, rng))
                for name, (_, _, p) in kinds.items()
                for i in range(8)
            ]
        )
    for context, is_greedy, probability in kinds.values():
        newcomer = DecodeRequest("new", context, is_greedy)
        assert model.survival_of(newcomer)[0] == pytest.approx(probability, abs=0.08)


FREE, CONSTRAINED = 0.8, 0.3


def run_requests(
    model: SurvivalModel,
    name: str,
    is_constrained: bool,
    count: int,
    rng: random.Random,
) -> None:
    """One after the other, 25 drafts each."""
    probability = CONSTRAINED if is_constrained else FREE
    for number in range(count):
        request = DecodeRequest(f"{name}{number}", 100, is_constrained=is_constrained)
        for _ in range(25):
            model.see(request)
            accepted = draw([probability] * 2, 2, rng)
            model.observe([RequestOutcome(request.request_id, 2, accepted)])


def newcomers(model: SurvivalModel) -> tuple[float, float]:
    """Survival of the first draft token of a free request, and a constrained one."""
    free, constrained = (
        model.survival_of(DecodeRequest("new", 100, is_constrained=is_constrained))[0]
        for is_constrained in (False, True)
    )
    return free, constrained


def test_what_constrained_requests_accept_is_not_believed_of_others() -> None:
    rng, model = random.Random(4), SurvivalModel(K_MAX)
    run_requests(model, "code", False, 20, rng)
    assert newcomers(model) == pytest.approx((FREE, FREE), abs=0.1)
    run_requests(model, "json", True, 3, rng)
    free, constrained = newcomers(model)
    assert constrained < 0.5
    assert free > constrained + 0.2


def test_after_both_were_seen_neither_has_to_be_found_out_again() -> None:
    rng, model = random.Random(5), SurvivalModel(K_MAX)
    for turn in range(4):
        run_requests(model, f"code{turn}-", False, 6, rng)
        run_requests(model, f"json{turn}-", True, 6, rng)
    free, constrained = newcomers(model)
    assert constrained == pytest.approx(CONSTRAINED, abs=0.12)
    assert free > constrained + 0.3


def test_a_new_kind_starts_from_the_one_that_has_most_in_common() -> None:
    profiles = Profiles(1, [0.5], 2.0)

    def acceptance(context: int, is_greedy: bool, is_constrained: bool) -> float:
        request = DecodeRequest("r", context, is_greedy, is_constrained=is_constrained)
        return logistic(profiles.of(cell_of(request)).logits[0])

    for context, is_greedy, accepted in ((100, True, 0.9), (50_000, False, 0.2)):
        cell = cell_of(DecodeRequest("r", context, is_greedy))
        profiles.of(cell).logits[0] = log_odds(accepted)
    assert acceptance(50_000, True, False) == pytest.approx(0.9)
    assert acceptance(100, False, False) == pytest.approx(0.2)
    assert acceptance(100, True, True) == pytest.approx(0.9)


def test_a_large_batch_is_sampled_in_turn_so_that_nobody_is_left_out() -> None:
    model = SurvivalModel(1, SurvivalOptions(max_outcomes=10))
    for i in range(35):
        model.see(DecodeRequest(f"r{i}", 0))
    before = {i: model.survival_of(DecodeRequest(f"r{i}", 0))[0] for i in range(35)}
    for _ in range(40):
        model.observe([RequestOutcome(f"r{i}", 1, i % 2) for i in range(35)])
    after = {i: model.survival_of(DecodeRequest(f"r{i}", 0))[0] for i in range(35)}
    assert max(after[i] for i in range(0, 35, 2)) < min(
        after[i] for i in range(1, 35, 2)
    )
    assert before[0] == before[1]


def test_requests_that_are_gone_are_forgotten() -> None:
    model = SurvivalModel(K_MAX)
    teach(model, {"old": [0.1] * K_MAX, "kept": [0.9] * K_MAX}, 100, random.Random(0))
    odd = model.survival_of(DecodeRequest("old", 100))
    model.keep_only(["kept"])
    assert set(model.class_of) == {"kept"}
    assert model.survival_of(DecodeRequest("old", 100))[0] > odd[0]


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
def test_whatever_it_hears_it_answers_with_probabilities(
    steps: list[list[tuple[str, int, int]]],
) -> None:
    """Unknown requests, more accepted than drafted, negative numbers."""
    model = SurvivalModel(K_MAX)
    for step in steps:
        model.observe([RequestOutcome(*each) for each in step])
    for name in "abz":
        request = DecodeRequest(name, 0)
        found = [1.0, *model.survival_of(request)]
        assert all(0 <= low <= high for high, low in pairwise(found))
        for interval, estimate in zip(
            model.intervals_of(request), found[1:], strict=True
        ):
            assert 0 <= interval.lower <= interval.upper <= 1
            # Classes are quantised, intervals are not.
            assert interval.lower - 0.15 <= estimate <= interval.upper + 0.15


def test_optimism_concerns_only_what_is_not_drafted() -> None:
    model = SurvivalModel(K_MAX)
    teach(model, {"r": [0.6] * K_MAX}, 50, random.Random(1), draft_length=2)
    class_id = model.class_of["r"]
    plain = model.survival_of_class(class_id)
    bold = model.optimistic_survival_of_class(class_id, 1.0, 2)
    assert bold[:2] == pytest.approx(plain[:2])
    assert bold[2] > plain[2]
    off = model.optimistic_survival_of_class(class_id, 1.0, 0)
    assert off[0] > plain[0]


@pytest.mark.parametrize("num_requests", [1, 6])
def test_steps_that_are_learned_together_teach_as_much(num_requests: int) -> None:
    """Also after a change: it may fall into the middle of them."""
    errors = [errors_alone_and_together(num_requests, seed) for seed in range(8)]
    alone, together = (statistics.fmean(each) for each in zip(*errors, strict=True))
    assert alone < 0.07
    assert together < alone + 0.015


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
                    abs(model.survival_of(DecodeRequest("r0", 100))[0] - truth[0])
                    for model in (alone, together)
                )
                if step > 100:
                    errors.append((first, second))
    first_errors, second_errors = zip(*errors, strict=True)
    return statistics.fmean(first_errors), statistics.fmean(second_errors)
