"""The cost model against step times that are drawn from known curves."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mtp.control.cost import CostModel
from vllm_mtp.control.step_times import request_bucket
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
        num_backfill_tokens=catch_up,
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
    times = model.times(num_requests, 500, True)
    return [times.seconds(k, k) for k in range(K_MAX + 1)]


TRUE_S = [cpu_s(k, k) for k in range(K_MAX + 1)]


def test_four_rows_may_cost_less_than_two() -> None:
    model = CostModel(K_MAX)
    teach_cpu(model, random.Random(1))
    assert learned(model) == pytest.approx(TRUE_S, rel=0.06)
    times = model.times(1, 500, True)
    assert times.seconds(3, 0) < times.seconds(1, 0)


def test_verifying_and_drafting_are_told_apart() -> None:
    model = CostModel(K_MAX)
    teach_cpu(model, random.Random(2))
    times = model.times(1, 500, True)
    drafting = times.seconds(0, 4) - times.seconds(0, 0)
    assert drafting == pytest.approx(4 * DRAFT_S, rel=0.25)
    verifying = times.seconds(4, 0) - times.seconds(0, 0)
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
    assert learned(model) == pytest.approx(TRUE_S, rel=0.06)


def test_dear_drafts_among_plain_steps_are_believed_within_a_few() -> None:
    """The first steps of 16 requests on an EPYC, where rows cost in proportion.

    Explorations follow each other with plain steps between them, so that steps with
    drafts are never many in a row. But plain steps that take what they should say that
    the machine is not to blame.
    """
    model = CostModel(8)
    recorded = [
        *((4, 0, 214), (0, 0, 59), (3, 3, 215), (3, 1, 186), (1, 1, 135), (1, 0, 114)),
        *((0, 0, 65), (4, 4, 257), (4, 0, 210), (0, 0, 70), (3, 3, 216), (3, 0, 200)),
    ]
    for length, depth, milliseconds in recorded:
        model.observe(outcome([length] * 16, depth, 1e-3 * milliseconds))
    times = model.times(16, 500, True)
    assert times.seconds(3, 3) > 0.75 * 0.215
    assert times.seconds(4, 4) > 0.75 * 0.25


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
    few, many = model.times(1, 500, True), model.times(64, 500, True)
    ratios = [t.seconds(4, 4) / t.seconds(0, 0) for t in (few, many)]
    assert ratios == pytest.approx([1.08, 4.2], rel=0.07)


def test_long_contexts_take_longer() -> None:
    model = CostModel(K_MAX)
    for step in range(400):
        length = step // 4 % (K_MAX + 1)
        for context, factor in ((500, 1.0), (20_000, 1.4)):
            seconds = 0.01 * factor * (1 + 0.1 * length)
            model.observe(outcome([length], length, seconds, context=context))
    short, long = model.times(1, 500, True), model.times(1, 20_000, True)
    assert short.seconds(4, 4) == pytest.approx(0.014, rel=0.05)
    assert long.seconds(4, 4) == pytest.approx(0.0196, rel=0.05)


def test_mixed_batches_are_a_tier_apart() -> None:
    """Unequal draft lengths leave the full CUDA graph: 30 % dearer here."""
    model = CostModel(K_MAX)
    rng = random.Random(8)
    for step in range(600):
        lengths = [2, 2, 2, 2] if step // 6 % 2 else [1, 3, 2, 2]
        seconds = 0.01 * (1.0 if step // 6 % 2 else 1.3) * rng.lognormvariate(0, 0.03)
        model.observe(outcome(lengths, 3, seconds))
    times = model.times(4, 500, True)
    assert times.seconds(2, 3) == pytest.approx(0.010, rel=0.03)
    assert times.seconds(2.0, 3, False) == pytest.approx(0.013, rel=0.03)


def test_some_without_drafts_make_a_mixed_batch() -> None:
    """Two of four verify two tokens each: as many rows as one for everybody."""
    model = CostModel(K_MAX)
    for step in range(400):
        is_mixed = step // 4 % 2
        lengths = [2, 0, 2, 0] if is_mixed else [1, 1, 1, 1]
        model.observe(outcome(lengths, 2, 0.013 if is_mixed else 0.01))
    times = model.times(4, 500, True)
    assert times.seconds(1, 2) == pytest.approx(0.01, rel=0.05)
    assert times.seconds(1.0, 2, False) == pytest.approx(0.013, rel=0.05)


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


def test_a_backfill_is_priced_and_does_not_make_drafting_look_dear() -> None:
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
    assert model.backfill_token_s == pytest.approx(1e-4, rel=0.5)
    assert undisturbed.backfill_token_s == 0.0
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
    times = learned_of_8_requests().times(num_requests, 500, True)
    believed = times.seconds(length, length) / times.seconds(0, 0)
    true = rows_s(num_requests, length) / rows_s(num_requests, 0)
    assert believed == pytest.approx(true, rel=0.12)


def test_what_sampling_costs_is_not_taken_for_the_time_of_greedy_steps() -> None:
    """Nor the other way round; a first guess is what the other kind takes."""
    model = learned_of_8_requests()
    greedy_s = learned(model, 8)
    first = model.times(8, 500, False)
    believed = first.seconds(2, 2) / first.seconds(0, 0)
    assert believed == pytest.approx(greedy_s[2] / greedy_s[0], rel=0.01)
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
        sampled_s = model.times(8, 500, False).seconds(length, length)
        true = rows_s(8, length) * (1.0 + 0.1 * length)
        assert sampled_s == pytest.approx(true, rel=0.05)


def test_buckets_grow_by_half_or_a_third_and_hold_their_size() -> None:
    bounds = sorted({request_bucket(n) for n in range(1, 4097)})
    assert bounds[:10] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    assert all(request_bucket(n) >= n for n in range(1, 4097))
    assert all(request_bucket(bound) == bound for bound in bounds)
    assert request_bucket(0) == 1


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
        times = model.times(num_requests, 500, True)
        estimates = [times.seconds(k, k) for k in range(K_MAX + 1)]
        estimates += [times.seconds(k / 3, K_MAX, False) for k in range(3 * K_MAX + 1)]
        assert all(0 < seconds < math.inf for seconds in estimates)
        sample = model.times(num_requests, 500, True, random.Random(0))
        assert all(0 < sample.seconds(k, k) < math.inf for k in range(K_MAX + 1))
    assert 0 <= model.backfill_token_s < math.inf


def test_verifying_without_drafting_does_not_make_draft_steps_seem_cheap() -> None:
    """The MTP layers pass over its rows all the same."""
    rng, model = random.Random(2), CostModel(K_MAX)
    for _ in range(30):
        for length, depth in [*[(1, 1)] * 12, (1, 0), (0, 0)]:
            seconds = idle_pass_s(length, depth) * rng.lognormvariate(0, 0.03)
            model.observe(outcome([length], depth, seconds))
    times = model.times(1, 500, True)
    for length, depth in [(1, 1), (0, 0)]:
        expected = times.seconds(length, depth)
        assert expected == pytest.approx(idle_pass_s(length, depth), rel=0.03)
    undrafted = times.seconds(1, 0)
    assert undrafted == pytest.approx(idle_pass_s(1, 0), rel=0.03)
    # Two draft steps were never seen.
    step_s = times.seconds(1, 2) - times.seconds(1, 1)
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
    times = model.times(8, 500, True)
    some = times.seconds(0.25, 0, False)
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
        model.times(num_requests, 500, True)  # a search, which learns what has come


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_plain", [0, 200])
def test_rows_that_cost_ten_times_the_prior_are_nearly_believed_soon(
    num_plain: int, seed: int
) -> None:
    model = CostModel(K_MAX)
    teach_proportional(model, [0], num_plain, seed)
    teach_proportional(model, [3, 2, 0, 1, 3, 0], 6, seed)
    times = model.times(16, 500, True)
    off_s = times.seconds(0, 0)
    for length in (1, 2, 3):
        true = proportional_s(length, length) / proportional_s(0, 0)
        found = times.seconds(length, length) / off_s
        assert 0.7 * true < found < 1.1 * true, length


@pytest.mark.parametrize("seed", range(5))
def test_dear_drafts_are_no_slow_machine(seed: int) -> None:
    """Two groups of a kind in a row that were both not expected are no jump."""
    model = CostModel(K_MAX)
    teach_proportional(model, [0], 200, seed)
    teach_proportional(model, [2] * 8, 8, seed)
    off_s = model.times(16, 500, True).seconds(0, 0)
    assert off_s < 1.5 * ROWS_IN_PROPORTION_S, "it takes 3.3 times as long"


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
    assert after == pytest.approx(before, rel=0.15)
