"""The cost model against step times that are drawn from known curves."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mtp.control.batch_kind import context_bucket, request_bucket
from vllm_mtp.control.cost import CostModel
from vllm_mtp.records import RequestOutcome, StepOutcome

K_MAX = 4
CPU_ROWS = {1: 1.00, 2: 1.39, 3: 1.33, 4: 1.30, 5: 1.36}
"""Seen on a CPU: a pass over four rows is cheaper than one over two."""
BASE_S = 9e-3
DRAFT_S = 0.06 * BASE_S


def outcome(
    lengths: list[int], depth: int, seconds: float, prefill: int = 0, catch_up: int = 0,
    context: int = 500,
) -> StepOutcome:  # fmt: skip
    """A step in which everything that was drafted was rejected."""
    return StepOutcome(
        requests=tuple(
            RequestOutcome(f"r{i}", k, 0) for i, k in enumerate(lengths) if k
        ),
        num_requests=len(lengths),
        num_scheduled_tokens=len(lengths) + sum(lengths) + prefill,
        step_time_s=seconds,
        draft_depth=depth,
        num_decode_requests=len(lengths),
        num_prefill_tokens=prefill,
        num_context_tokens=context * len(lengths),
        num_catch_up_tokens=catch_up,
    )


def cpu_s(length: int, depth: int) -> float:
    """Of a single request."""
    return BASE_S * CPU_ROWS[1 + length] + DRAFT_S * depth


def idle_pass_s(length: int, depth: int) -> float:
    """Of a runner whose MTP layers read the rows of every draft that is verified."""
    mtp_pass, choice = 0.12, 0.02
    num_passes = max(depth, min(length, 1))
    parts = 1.0 + 0.05 * length + mtp_pass * num_passes + choice * depth
    return BASE_S * parts


def teach_cpu(
    model: CostModel,
    rng: random.Random,
    num_steps: int = 400,
    disturb: Callable[[int], float] = lambda step: 1.0,
) -> None:
    """Stays at each K for a few steps, as a controller does."""
    length = depth = 0
    for step in range(num_steps):
        if step % 4 == 0:
            depth = rng.randint(0, K_MAX)
        seconds = cpu_s(length, depth) * rng.lognormvariate(0, 0.04) * disturb(step)
        model.observe(outcome([length], depth, seconds))
        length = depth


def learned(model: CostModel, num_requests: int = 1) -> list[float]:
    """Expected seconds at K = 0 .. K_max."""
    times = model.times(num_requests, 500)
    return [times.uniform(k, k).seconds for k in range(K_MAX + 1)]


TRUE_S = [cpu_s(k, k) for k in range(K_MAX + 1)]


def test_four_rows_may_cost_less_than_two() -> None:
    model = CostModel(K_MAX)
    teach_cpu(model, random.Random(1))
    assert learned(model) == pytest.approx(TRUE_S, rel=0.04)
    times = model.times(1, 500)
    assert times.uniform(3, 0).seconds < times.uniform(1, 0).seconds


def test_verifying_and_drafting_are_told_apart() -> None:
    model = CostModel(K_MAX)
    teach_cpu(model, random.Random(2))
    times = model.times(1, 500)
    drafting = times.uniform(0, 4).seconds - times.uniform(0, 0).seconds
    assert drafting == pytest.approx(4 * DRAFT_S, rel=0.25)
    verifying = times.uniform(4, 0).seconds - times.uniform(0, 0).seconds
    assert verifying == pytest.approx(0.36 * BASE_S, rel=0.25)


@pytest.mark.parametrize("seed", range(3))
def test_steps_that_take_ten_times_as_long_hardly_matter(seed: int) -> None:
    model = CostModel(K_MAX)
    spikes = random.Random(9 + seed)
    num_spikes = 0

    def disturb(step: int) -> float:
        nonlocal num_spikes
        is_spike = spikes.random() < 0.03
        num_spikes += is_spike
        return 10.0 if is_spike else 1.0

    teach_cpu(model, random.Random(3 + seed), 800, disturb)
    assert num_spikes > 10
    assert learned(model) == pytest.approx(TRUE_S, rel=0.03)


def test_dear_drafts_among_plain_steps_are_believed_within_a_few() -> None:
    """The first steps of 16 requests on an EPYC, where rows cost in proportion.

    Probes follow each other with plain steps between them, so that steps with drafts
    are never many in a row. But plain steps that take what they should say that the
    machine is not to blame.
    """
    model = CostModel(8)
    recorded = [
        *((4, 0, 214), (0, 0, 59), (3, 3, 215), (3, 1, 186), (1, 1, 135), (1, 0, 114)),
        *((0, 0, 65), (4, 4, 257), (4, 0, 210), (0, 0, 70), (3, 3, 216), (3, 0, 200)),
    ]
    for length, depth, milliseconds in recorded:
        model.observe(outcome([length] * 16, depth, 1e-3 * milliseconds))
    times = model.times(16, 500)
    assert times.uniform(3, 3).seconds > 0.75 * 0.215
    assert times.uniform(4, 4).seconds > 0.75 * 0.25


def test_a_first_step_ten_times_too_long_is_outgrown() -> None:
    model = CostModel(K_MAX)
    teach_cpu(model, random.Random(4), 200, lambda step: 10.0 if step == 0 else 1.0)
    assert learned(model) == pytest.approx(TRUE_S, rel=0.06)


def test_a_burst_of_slow_steps_is_forgotten() -> None:
    model = CostModel(K_MAX)
    burst = range(400, 420)
    teach_cpu(model, random.Random(5), 700, lambda step: 10.0 if step in burst else 1.0)
    assert learned(model) == pytest.approx(TRUE_S, rel=0.1)


def test_a_machine_that_grows_slower_is_followed_and_ratios_stay() -> None:
    model = CostModel(K_MAX)
    teach_cpu(model, random.Random(6), 1500, lambda step: 1.0 + 0.5 * step / 1500)
    found = learned(model)
    assert found[0] == pytest.approx(1.5 * TRUE_S[0], rel=0.08)
    ratios = [seconds / found[0] for seconds in found]
    assert ratios == pytest.approx([s / TRUE_S[0] for s in TRUE_S], rel=0.06)


def test_what_one_request_costs_does_not_hide_what_many_cost() -> None:
    """Rows are free for one request and dear for 64."""
    model = CostModel(K_MAX)
    rng = random.Random(7)
    for step in range(600):
        length = step // 4 % (K_MAX + 1)
        for num_requests, row_cost in ((1, 0.02), (64, 0.8)):
            seconds = 0.01 * (1 + row_cost * length) * rng.lognormvariate(0, 0.03)
            model.observe(outcome([length] * num_requests, length, seconds))
    few, many = model.times(1, 500), model.times(64, 500)
    ratios = [t.uniform(4, 4).seconds / t.uniform(0, 0).seconds for t in (few, many)]
    assert ratios == pytest.approx([1.08, 4.2], rel=0.05)


def test_long_contexts_have_times_of_their_own() -> None:
    model = CostModel(K_MAX)
    for step in range(400):
        length = step // 4 % (K_MAX + 1)
        for context, row_cost in ((500, 0.02), (20_000, 0.5)):
            seconds = 0.01 * (1 + row_cost * length)
            model.observe(outcome([length], length, seconds, context=context))
    short, long = model.times(1, 500), model.times(1, 20_000)
    assert short.uniform(4, 4).seconds == pytest.approx(0.0108, rel=0.05)
    assert long.uniform(4, 4).seconds == pytest.approx(0.03, rel=0.05)


def test_mixed_batches_are_a_tier_apart() -> None:
    """Unequal draft lengths leave the full CUDA graph: 30 % dearer here."""
    model = CostModel(K_MAX)
    rng = random.Random(8)
    for step in range(600):
        lengths = [2, 2, 2, 2] if step // 6 % 2 else [1, 3, 2, 2]
        seconds = 0.01 * (1.0 if step // 6 % 2 else 1.3) * rng.lognormvariate(0, 0.03)
        model.observe(outcome(lengths, 3, seconds))
    times = model.times(4, 500)
    assert times.uniform(2, 3).seconds == pytest.approx(0.010, rel=0.03)
    assert times.mixed(2.0, 3).seconds == pytest.approx(0.013, rel=0.03)


def test_some_without_drafts_make_a_mixed_batch() -> None:
    """Two of four verify two tokens each: as many rows as one for everybody."""
    model = CostModel(K_MAX)
    for step in range(400):
        is_mixed = step // 4 % 2
        lengths = [2, 0, 2, 0] if is_mixed else [1, 1, 1, 1]
        model.observe(outcome(lengths, 2, 0.013 if is_mixed else 0.01))
    times = model.times(4, 500)
    assert times.uniform(1, 2).seconds == pytest.approx(0.01, rel=0.03)
    assert times.mixed(1.0, 2).seconds == pytest.approx(0.013, rel=0.03)


def test_requests_in_prefill_are_not_rows_of_a_decision() -> None:
    model, undisturbed = CostModel(K_MAX), CostModel(K_MAX)
    for step in range(100):
        length = step % 3
        for each in (model, undisturbed):
            each.observe(outcome([length], length, cpu_s(length, length)))
        model.observe(outcome([length], length, 0.5, prefill=2000))
    assert learned(model) == pytest.approx(learned(undisturbed), rel=0.01)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_a_time_that_is_none_is_ignored(seconds: float) -> None:
    model = CostModel(K_MAX)
    model.observe(outcome([1], 1, seconds))
    teach_cpu(model, random.Random(1), 200)
    before = learned(model)
    for _ in range(20):
        model.observe(outcome([1], 1, seconds))
    assert learned(model) == pytest.approx(before, rel=1e-3)


def test_catching_up_is_priced_and_does_not_make_drafting_look_dear() -> None:
    model, undisturbed = CostModel(K_MAX), CostModel(K_MAX)
    for step in range(300):
        length = 2 if step % 20 > 10 else 0
        depth = 2 if step % 20 >= 10 else 0
        seconds = cpu_s(length, depth)
        undisturbed.observe(outcome([length], depth, seconds))
        if step % 20 == 10:
            model.observe(outcome([length], depth, seconds + 64 * 1e-4, catch_up=64))
        else:
            model.observe(outcome([length], depth, seconds))
    assert model.catch_up_token_s == pytest.approx(1e-4, rel=0.5)
    assert undisturbed.catch_up_token_s == 0.0
    assert learned(model) == pytest.approx(learned(undisturbed), rel=0.1)


def rows_s(num_requests: int, length: int) -> float:
    """Of a machine on which it is the rows of a pass that cost."""
    pass_s, plain_s = (5e-3 + 6.25e-4 * num_requests * rows for rows in (1 + length, 1))
    return pass_s + 0.1 * plain_s * length


def learned_of_8_requests() -> CostModel:
    model = CostModel(K_MAX)
    for step in range(400):
        length = step // 4 % (K_MAX + 1)
        model.observe(outcome([length] * 8, length, rows_s(8, length)))
    return model


@pytest.mark.parametrize("num_requests", [4, 6, 12, 16])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_a_new_batch_size_starts_from_the_rows_of_the_nearest_known(
    num_requests: int, length: int
) -> None:
    times = learned_of_8_requests().times(num_requests, 500)
    believed = times.uniform(length, length).seconds / times.uniform(0, 0).seconds
    true = rows_s(num_requests, length) / rows_s(num_requests, 0)
    assert believed == pytest.approx(true, rel=0.03)


def test_a_new_batch_size_is_known_better_than_nothing_and_less_than_the_nearest() -> (
    None
):
    model = learned_of_8_requests()
    nearby, nearest = (model.times(n, 500).uniform(4, 4) for n in (16, 8))
    nothing = CostModel(K_MAX).times(16, 500).uniform(4, 4)
    assert nothing.deviation > nearby.deviation > nearest.deviation


def test_what_sampling_costs_is_not_taken_for_the_time_of_greedy_steps() -> None:
    """Nor the other way round; a first guess is what the other kind takes."""
    model = learned_of_8_requests()
    greedy_s = learned(model, 8)
    first = model.times(8, 500, is_greedy=False)
    believed = first.uniform(2, 2).seconds / first.uniform(0, 0).seconds
    assert believed == pytest.approx(greedy_s[2] / greedy_s[0], rel=0.01)
    doubt = model.times(8, 500).uniform(2, 2).deviation
    assert first.uniform(2, 2).deviation > 2 * doubt
    rng = random.Random(0)
    for step in range(600):
        length = step // 4 % (K_MAX + 1)
        seconds = rows_s(8, length) * (1.0 + 0.1 * length)
        seconds *= rng.lognormvariate(0, 0.03)
        sampled = outcome([length] * 8, length, seconds)
        model.observe(sampled._replace(is_greedy=False))
    after = learned(model, 8)
    assert after == pytest.approx(greedy_s, rel=0.01)
    for length in (0, 2, K_MAX):
        sampled_s = model.times(8, 500, is_greedy=False).uniform(length, length).seconds
        true = rows_s(8, length) * (1.0 + 0.1 * length)
        assert sampled_s == pytest.approx(true, rel=0.05)


def test_what_was_visited_is_known_better_than_what_was_not() -> None:
    model = CostModel(K_MAX)
    for _ in range(50):
        model.observe(outcome([1], 1, cpu_s(1, 1)))
    times = model.times(1, 500)
    assert times.uniform(1, 1).deviation < 0.03
    assert times.uniform(4, 4).deviation > 2 * times.uniform(1, 1).deviation


def test_buckets_grow_by_half_or_a_third_and_hold_their_size() -> None:
    bounds = sorted({request_bucket(n) for n in range(1, 4097)})
    assert bounds[:10] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    assert all(request_bucket(n) >= n for n in range(1, 4097))
    assert all(request_bucket(bound) == bound for bound in bounds)
    assert request_bucket(0) == 1
    assert request_bucket(10**6) == bounds[-1]
    assert [context_bucket(n) for n in (0, 1023, 1024, 10**7)] == [0, 0, 1, 4]


STEP = st.builds(
    outcome,
    st.lists(st.integers(0, 9), max_size=5),
    st.integers(-1, 9),
    st.one_of(st.floats(1e-6, 1e3), st.floats(allow_nan=True, allow_infinity=True)),
    st.sampled_from([0, 0, 0, 100]),
    st.sampled_from([0, 0, 7]),
    st.integers(0, 10**6),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, max_size=40))
def test_whatever_it_hears_it_expects_positive_times(steps: list[StepOutcome]) -> None:
    model = CostModel(K_MAX)
    for step in steps:
        model.observe(step)
    for num_requests in (1, 3, 5):
        times = model.times(num_requests, 500)
        estimates = [times.uniform(k, k) for k in range(K_MAX + 1)]
        estimates += [times.mixed(k / 3, K_MAX) for k in range(3 * K_MAX + 1)]
        for seconds, deviation in estimates:
            assert 0 < seconds < math.inf
            assert 0 <= deviation < math.inf
    assert 0 <= model.catch_up_token_s < math.inf


@pytest.mark.parametrize("depth", [0, 3])
def test_the_curve_of_mixed_batches_is_made_of_the_single_times(depth: int) -> None:
    model = CostModel(K_MAX)
    # So that drafting has an overhead of its own: a priori there is none.
    for step in range(40):
        drafted = (0, 1, 3)[step % 3]
        seconds = 0.01 + 0.004 * (drafted > 0) + 0.001 * drafted
        model.observe(StepOutcome((), 4, 4, seconds, drafted, 4, 0, 2000))
    times = model.times(4, 500.0)
    singles = [
        times.mixed(halves / 2, depth).seconds for halves in range(2 * K_MAX + 1)
    ]
    assert times.mixed_curve(depth) == pytest.approx(singles)


def test_verifying_without_drafting_does_not_make_draft_steps_seem_cheap() -> None:
    """The MTP layers pass over its rows all the same."""
    rng, model = random.Random(2), CostModel(K_MAX)
    for _ in range(30):
        for length, depth in [*[(1, 1)] * 12, (1, 0), (0, 0)]:
            seconds = idle_pass_s(length, depth) * rng.lognormvariate(0, 0.03)
            model.observe(outcome([length], depth, seconds))
    times = model.times(1, 500)
    for length, depth in [(1, 1), (0, 0)]:
        expected = times.uniform(length, depth).seconds
        assert expected == pytest.approx(idle_pass_s(length, depth), rel=0.03)
    undrafted = times.undrafted(1, is_uniform=True).seconds
    assert undrafted == pytest.approx(idle_pass_s(1, 0), rel=0.03)
    # Two draft steps were never seen.
    step_s = times.uniform(1, 2).seconds - times.uniform(1, 1).seconds
    assert step_s > 0.08 * BASE_S


def test_verifying_the_drafts_of_some_without_drafting_is_known_by_its_mean() -> None:
    rng, model = random.Random(3), CostModel(K_MAX)
    for _ in range(60):
        for lengths, depth, relative in [
            *[([0] * 8, 0, 1.0)] * 8,
            ([0] * 8, 1, 1.2),
            ([1, 1, 0, 0, 0, 0, 0, 0], 0, 1.45),
        ]:
            seconds = BASE_S * relative * rng.lognormvariate(0, 0.02)
            model.observe(outcome(lengths, depth, seconds))
    times = model.times(8, 500)
    some = times.undrafted(0.25, is_uniform=False).seconds
    assert some == pytest.approx(1.45 * BASE_S, rel=0.05)


ROWS_IN_PROPORTION_S = 28e-3
"""Of a batch that is bound by arithmetic: a pass takes in proportion to its rows."""


def proportional_s(length: int, depth: int) -> float:
    return ROWS_IN_PROPORTION_S * (1.0 + 0.95 * length + 0.2 * depth)


def teach_proportional(
    model: CostModel,
    depths: list[int],
    steps_at_each: int,
    seed: int = 0,
    num_requests: int = 16,
) -> None:
    """Steps in which all requests draft equally deep, by turns."""
    rng, length = random.Random(seed), 0
    for depth in depths:
        for _ in range(steps_at_each):
            seconds = proportional_s(length, depth) * rng.lognormvariate(0, 0.03)
            model.observe(outcome([length] * num_requests, depth, seconds))
            length = depth
        model.times(num_requests, 500)  # a search, which learns what has come


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_plain", [0, 200])
def test_rows_that_cost_ten_times_the_prior_are_believed_soon(
    num_plain: int, seed: int
) -> None:
    model = CostModel(K_MAX)
    teach_proportional(model, [0], num_plain, seed)
    teach_proportional(model, [3, 2, 0, 1, 3, 0], 6, seed)
    times = model.times(16, 500)
    off_s = times.uniform(0, 0).seconds
    for length in (1, 2, 3):
        true = proportional_s(length, length) / proportional_s(0, 0)
        found = times.uniform(length, length).seconds / off_s
        assert found == pytest.approx(true, rel=0.06), length


@pytest.mark.parametrize("seed", range(5))
def test_dear_drafts_are_no_slow_machine(seed: int) -> None:
    """Two groups of a kind in a row that were both not expected are no jump."""
    model = CostModel(K_MAX)
    teach_proportional(model, [0], 200, seed)
    teach_proportional(model, [2] * 8, 8, seed)
    off_s = model.times(16, 500).uniform(0, 0).seconds
    assert off_s == pytest.approx(ROWS_IN_PROPORTION_S, rel=0.1)


@pytest.mark.parametrize(("num_slow", "factor"), [(1, 10.0), (4, 3.0), (12, 1.5)])
def test_a_few_slow_steps_do_not_overthrow_what_is_believed(
    num_slow: int, factor: float
) -> None:
    """However slow one is, three times too slow for four, and half for a dozen."""
    model = CostModel(K_MAX)
    teach_cpu(model, random.Random(0))
    before = [t / learned(model)[0] for t in learned(model)]
    # After steps of the same kind these would pass for a jump of the machine.
    model.observe(outcome([0], 0, cpu_s(0, 0)))
    for _ in range(num_slow):
        model.observe(outcome([2], 2, factor * cpu_s(2, 2)))
    model.observe(outcome([0], 0, cpu_s(0, 0)))
    after = [t / learned(model)[0] for t in learned(model)]
    assert after == pytest.approx(before, rel=0.12)


def test_plain_steps_are_a_guess_until_one_was_seen() -> None:
    model = CostModel(K_MAX)
    teach_proportional(model, [2], 20)
    assert not model.times(16, 500).guesses_plain  # too early to ask
    teach_proportional(model, [2], 40)
    assert model.times(16, 500).guesses_plain
    assert not model.times(4, 500).guesses_plain  # another batch, not seen at all
    model.observe(outcome([0] * 16, 0, ROWS_IN_PROPORTION_S))
    assert not model.times(16, 500).guesses_plain
