"""Cost curves: each assumption of the roofline model, seen in its times."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.control.synthetic_cost import CPU_TABLE
from benchmarks.control.synthetic_worlds import COSTS
from vllm_mtp.tools.plan_cost import B200, DENSE_7B, H100, MOE_671B, RooflineCost

H100_7B = RooflineCost(H100, DENSE_7B)
MOE = RooflineCost(B200, MOE_671B, num_gpus=16)


def verify(cost: RooflineCost, *rows: int, context: float = 0.0) -> list[float]:
    seconds = cost.verify_s(1, np.array(rows), context, is_uniform=True)
    return [float(value) for value in seconds]


@pytest.mark.parametrize("name", sorted(COSTS))
def test_times_are_positive_and_finite_to_a_thousand_requests(name: str) -> None:
    cost, rows = COSTS[name], np.arange(1, 9 * 1024 + 1)
    seconds = cost.verify_s(1024, rows, 1e6, is_uniform=False)
    assert np.isfinite(seconds).all()
    assert (seconds > 0).all()
    assert cost.draft_s(1024, 0, 1e6) == 0
    depths = [cost.draft_s(1024, depth, 1e6) for depth in range(9)]
    assert depths == sorted(depths)
    assert cost.catch_up_s(10) > 0


def test_on_a_cpu_a_pass_over_two_rows_is_dearer_than_one_over_four() -> None:
    one, two, four = CPU_TABLE.verify_s(1, np.array([1, 2, 4]), 0.0, True)
    assert one < four < two


def test_a_table_goes_on_beyond_its_last_point() -> None:
    ends = CPU_TABLE.verify_s(1, np.array([64, 128, 192]), 0.0, True)
    assert ends[2] - ends[1] == pytest.approx(ends[1] - ends[0])


def test_few_rows_of_a_dense_model_cost_one_reading_of_the_weights() -> None:
    one, many = verify(H100_7B, 1, 64)
    assert many == pytest.approx(one)
    reading_s = 2 * DENSE_7B.dense_weights / (0.7 * H100.bytes_per_s)
    assert one == pytest.approx(reading_s + H100_7B.launch_s)


def test_many_rows_are_bound_by_arithmetic() -> None:
    half, whole = verify(H100_7B, 1024, 2048)
    work_s = 2 * DENSE_7B.dense_weights * 1024 / (0.6 * H100.flops_per_s)
    assert whole - half == pytest.approx(work_s)


def test_context_is_read_once_whatever_the_rows() -> None:
    short = verify(H100_7B, 1, 64)
    long = verify(H100_7B, 1, 64, context=1e5)
    more = [b - a for a, b in zip(short, long, strict=True)]
    assert more == pytest.approx([1e5 * 147e3 / (0.7 * H100.bytes_per_s)] * 2)


@pytest.mark.parametrize(
    ("rows", "padded"), [(3, 4), (5, 8), (9, 16), (250, 256), (257, 272), (513, 513)]
)
def test_rows_are_padded_to_the_next_cuda_graph(rows: int, padded: int) -> None:
    # Few FLOP/s, so that every row shows.
    slow = RooflineCost(replace(H100, flops_per_s=1e12), DENSE_7B)
    unpadded_s = 2 * DENSE_7B.dense_weights * padded / (0.6 * 1e12)
    assert verify(slow, rows)[0] == pytest.approx(unpadded_s + slow.launch_s)


def test_unequal_draft_lengths_run_without_a_full_graph() -> None:
    rows = np.array([8])
    even, mixed = (H100_7B.verify_s(4, rows, 0.0, u)[0] for u in (True, False))
    assert mixed - even == pytest.approx(H100_7B.mixed_launch_s)


def test_with_experts_further_rows_read_new_experts_until_all_are_read() -> None:
    one, two, many, more = verify(MOE, 1, 2, 480, 512)
    assert two - one > 0.5 * (one - MOE.launch_s) * 8 / 256
    # All 256 experts are touched by then: what is left is the exchange.
    assert more - many < 0.02 * many
    assert many > 2 * one
    assert verify(H100_7B, 1) == pytest.approx(verify(H100_7B, 2))


def test_the_share_of_touched_experts_is_that_of_independent_choices() -> None:
    experts = MOE_671B.experts
    assert experts is not None
    random = np.random.default_rng(0)
    touched = [
        len({*np.concatenate([random.permutation(256)[:8] for _ in range(16)])})
        for _ in range(200)
    ]
    weights, _ = MOE._expert_weights(np.array([16.0]), experts)
    every = experts.num_layers * experts.weights_per_expert
    assert weights[0] / every == pytest.approx(np.mean(touched), rel=0.02)


def test_fp8_halves_reading_and_arithmetic_but_not_the_cache() -> None:
    eight = H100_7B.in_fp8()
    for rows in (1, 2048):
        wide, narrow = verify(H100_7B, rows)[0], verify(eight, rows)[0]
        assert narrow - eight.launch_s == pytest.approx((wide - H100_7B.launch_s) / 2)
    cache = [
        verify(cost, 1, context=1e5)[0] - verify(cost, 1)[0]
        for cost in (H100_7B, eight)
    ]
    assert cache[0] == pytest.approx(cache[1])


def test_a_catch_up_pass_needs_no_head() -> None:
    step_s = H100_7B.draft_s(1, 1, 0.0)
    head_s = 2 * DENSE_7B.head_weights / (0.7 * H100.bytes_per_s)
    assert step_s - H100_7B.catch_up_s(1) == pytest.approx(head_s)


def test_more_gpus_divide_everything_but_the_launches() -> None:
    two = replace(H100_7B, num_gpus=2)
    one_s, two_s = verify(H100_7B, 1, context=1e5)[0], verify(two, 1, context=1e5)[0]
    assert two_s - two.launch_s == pytest.approx((one_s - H100_7B.launch_s) / 2)
