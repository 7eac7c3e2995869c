"""The planner against trying everything, on batches small enough for it."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mtp.acceptance import survival
from vllm_mtp.control.expected_times import ExpectedTimes
from vllm_mtp.control.planner import Batch, Group, PinnedGroup, Plan, plans
from vllm_mtp.control.step_times import Layout, Shape, StepTimes

K_MAX = 3
DEPTHS = range(K_MAX + 1)
LAYOUT = Layout(K_MAX)
NUM_PARTS = LAYOUT.size


def times_of(
    verify: list[float], mixed: float = 0.0, draft: float = 0.1
) -> ExpectedTimes:
    """Known times: any for K = 0 .. K_max, straight lines between, no doubt."""
    uneven = [
        (verify[h // 2] + verify[(h + 1) // 2]) / 2 + mixed
        for h in range(2 * K_MAX + 1)
    ]
    nothing = np.zeros((NUM_PARTS, NUM_PARTS))
    shape = Shape([*verify, *uneven, 0.0, 0.0, draft], nothing, nothing)
    return ExpectedTimes(LAYOUT, StepTimes(shape), 1.0)


def value(batch: Batch, times: ExpectedTimes, depth: int, lengths: list[int]) -> float:
    """Goodput of any draft lengths, one for each free group."""
    served = [
        *zip(batch.groups, lengths, strict=True),
        *((pinned, pinned.draft_length) for pinned in batch.pinned),
    ]
    tokens = sum(g.num_requests * (1 + sum(g.survival[:k])) for g, k in served)
    rows = sum(g.num_requests * k for g, k in served)
    distinct = {k for _, k in served}
    if len(distinct) == 1:
        seconds = times.uniform(distinct.pop(), depth).seconds
    else:
        seconds = times.mixed(rows / batch.num_requests, depth).seconds
    return tokens / seconds


def group(num_requests: int, conditional: list[float]) -> Group:
    survived = survival(conditional)
    return Group(num_requests, survived, survived)


# Distinct probabilities: requests that are equal share a class, so a group.
PROBABILITIES = st.lists(st.floats(0.01, 0.99), min_size=K_MAX, max_size=K_MAX)
GROUPS = st.lists(
    st.builds(group, st.integers(1, 3), PROBABILITIES), min_size=1, max_size=3
)
TIMES = st.builds(
    times_of,
    st.lists(st.floats(0.5, 3.0), min_size=K_MAX + 1, max_size=K_MAX + 1),
    st.floats(0.0, 0.3),
    st.floats(0.01, 0.5),
)


def has_ties(groups: list[Group]) -> bool:
    marginals = [s for g in groups for s in g.survival]
    return len(set(marginals)) < len(marginals)


@settings(max_examples=200, deadline=None)
@given(GROUPS, TIMES)
def test_no_assignment_of_draft_lengths_beats_the_best_plan(
    groups: list[Group], times: ExpectedTimes
) -> None:
    """Where unequal lengths cost what the straight line says: then only the number of
    rows counts, and the rows go to the drafts that are likeliest to survive."""
    if has_ties(groups):
        return
    batch = Batch(groups)
    found = plans(batch, times, DEPTHS, keep=DEPTHS)
    best = max(plan.goodput for plan in found)
    rest = []
    for depth in DEPTHS:
        marginals = sorted(
            (s for g in groups for s in g.survival[:depth]), reverse=True
        )
        for cut in (2.0, *marginals):
            lengths = [sum(s >= cut for s in g.survival[:depth]) for g in groups]
            rest.append(value(batch, times, depth, lengths))
    assert best <= max(rest) * (1 + 1e-9)
    # Plans in which all get the same less than the depth are the only ones left out.
    alike = [
        value(batch, times, d, [k] * len(groups)) for d in DEPTHS for k in range(d)
    ]
    assert best >= max(value for value in rest if value not in alike) * (1 - 1e-9)


@settings(max_examples=200, deadline=None)
@given(GROUPS, st.integers(1, K_MAX), st.data())
def test_rows_go_to_the_drafts_that_are_likeliest_to_survive(
    groups: list[Group], depth: int, data: st.DataObject
) -> None:
    """No other assignment of as many rows brings more tokens than a plan's."""
    if has_ties(groups):
        return
    lengths = [
        data.draw(st.integers(0, depth), label=f"K of group {i}")
        for i in range(len(groups))
    ]
    rows = sum(g.num_requests * k for g, k in zip(groups, lengths, strict=True))
    tokens = sum(
        g.num_requests * sum(g.survival[:k])
        for g, k in zip(groups, lengths, strict=True)
    )
    times = times_of([1.0, 1.1, 1.2, 1.3])
    for plan in plans(Batch(groups), times, DEPTHS, keep=DEPTHS):
        served = [plan.draft_length(g.survival) for g in groups]
        planned = sum(g.num_requests * k for g, k in zip(groups, served, strict=True))
        if plan.depth >= depth and planned == rows:
            base = sum(g.num_requests for g in groups)
            assert plan.tokens - base >= tokens - 1e-9


@settings(max_examples=200, deadline=None)
@given(GROUPS, TIMES)
def test_a_plan_says_what_its_draft_lengths_are_worth(
    groups: list[Group], times: ExpectedTimes
) -> None:
    if has_ties(groups):
        return
    batch = Batch(groups)
    for plan in plans(batch, times, DEPTHS, keep=DEPTHS):
        lengths = [plan.draft_length(g.survival) for g in groups]
        assert max(lengths) <= plan.depth
        tokens = sum(
            g.num_requests * (1 + sum(g.survival[:k]))
            for g, k in zip(groups, lengths, strict=True)
        )
        assert plan.tokens == pytest.approx(tokens)
        if plan.is_uniform or len(set(lengths)) > 1:
            worth = value(batch, times, plan.depth, lengths)
            assert plan.goodput == pytest.approx(worth, rel=1e-6)
        acceptance_lengths = [
            1 + sum(g.survival[:k]) for g, k in zip(groups, lengths, strict=True)
        ]
        assert plan.worst_acceptance_length == pytest.approx(min(acceptance_lengths))
        latency = plan.seconds / min(acceptance_lengths)
        assert plan.worst_token_latency_s == pytest.approx(latency)


def best_of(found: list[Plan]) -> Plan:
    return max(found, key=lambda plan: plan.goodput)


def test_where_verification_is_dear_only_the_likely_are_drafted_for() -> None:
    good, bad = group(4, [0.9, 0.9, 0.9]), group(4, [0.1, 0.1, 0.1])
    plan = best_of(plans(Batch([good, bad]), times_of([1.0, 1.6, 2.2, 2.8]), DEPTHS))
    assert plan.draft_length(good.survival) > 0
    assert plan.draft_length(bad.survival) == 0


def test_a_dip_in_the_times_is_found() -> None:
    """Four rows cheaper than two or three: K = 3 although K = 1 and K = 2 lose."""
    batch = Batch([group(1, [0.5, 0.5, 0.5])])
    found = plans(batch, times_of([1.0, 1.9, 1.9, 1.05], draft=0.05), DEPTHS)
    assert best_of(found).depth == 3


def test_drafting_deeper_for_a_few_is_found_though_it_does_not_pay_for_all() -> None:
    deepest = 8
    layout = Layout(deepest)
    verify = [1.0 + 0.3 * k for k in range(deepest + 1)]
    uneven = [1.0 + 0.15 * h for h in range(2 * deepest + 1)]
    nothing = np.zeros((layout.size, layout.size))
    shape = Shape([*verify, *uneven, 0.0, 0.0, 0.01], nothing, nothing)
    times = ExpectedTimes(layout, StepTimes(shape), 1.0)
    sure, vain = group(6, [0.98] * deepest), group(58, [0.05] * deepest)
    found = plans(Batch([sure, vain]), times, range(deepest + 1))
    plan = best_of(found)
    assert plan.depth == deepest
    assert plan.draft_length(sure.survival) == deepest
    assert plan.draft_length(vain.survival) == 0
    uniform = sorted((p for p in found if p.is_uniform), key=lambda p: -p.goodput)
    assert [p.depth for p in uniform[:3]] == [0, 1, 2]


def test_nothing_accepted_means_nothing_drafted() -> None:
    batch = Batch([group(3, [0.01, 0.01, 0.01]), group(2, [0.02, 0.01, 0.01])])
    assert best_of(plans(batch, times_of([1.0, 1.1, 1.2, 1.3]), DEPTHS)).depth == 0


def test_only_allowed_depths_are_planned() -> None:
    batch = Batch([group(2, [0.9] * 3), group(1, [0.5] * 3)])
    found = plans(batch, times_of([1.0] * 4), (0, 2), keep=(0, 2))
    assert {plan.depth for plan in found} == {0, 2}


def test_where_steps_are_graphs_all_plans_are_uniform() -> None:
    batch = Batch([group(2, [0.9] * 3), group(1, [0.1] * 3)])
    times = times_of([1.0, 1.4, 1.8, 2.2])
    assert not all(plan.is_uniform for plan in plans(batch, times, DEPTHS))
    found = plans(batch, times, DEPTHS, keep=DEPTHS, may_mix=False)
    assert [plan.depth for plan in found] == [*DEPTHS]
    assert all(plan.is_uniform for plan in found)
    # Ranks that must draft equally deep can be off by verifying nothing alone.
    assert not all(p.is_uniform for p in plans(batch, times, (2,), may_mix=False))


@given(st.integers(0, K_MAX), st.integers(1, 3), GROUPS, TIMES)
@settings(max_examples=100, deadline=None)
def test_pinned_requests_set_the_least_depth_and_are_counted(
    pin: int, num_pinned: int, groups: list[Group], times: ExpectedTimes
) -> None:
    if has_ties(groups):
        return
    pinned = PinnedGroup(num_pinned, pin, survival([0.7] * K_MAX))
    batch = Batch(groups, [pinned])
    found = plans(batch, times, DEPTHS, keep=DEPTHS)
    assert {plan.depth for plan in found} == set(range(pin, K_MAX + 1))
    for plan in found:
        lengths = [plan.draft_length(g.survival) for g in groups]
        if len({*lengths, pin}) > 1 or plan.is_uniform:
            worth = value(batch, times, plan.depth, lengths)
            assert plan.goodput == pytest.approx(worth, rel=1e-6)


def test_a_batch_of_pinned_requests_only_has_a_plan() -> None:
    batch = Batch([], [PinnedGroup(2, 1, [0.8] * 3), PinnedGroup(1, 3, [0.5] * 3)])
    (plan,) = plans(batch, times_of([1.0, 1.1, 1.2, 1.3]), DEPTHS)
    assert plan.depth == 3
    assert plan.tokens == pytest.approx(2 * 1.8 + 1 + 1.5)


def test_optimism_counts_for_acceptance_and_for_cost() -> None:
    bold = Group(1, [0.5, 0.2, 0.1], [0.9, 0.8, 0.7])
    doubtful = StepTimes(
        Shape(
            [1.0] * (NUM_PARTS - 3) + [0.0, 0.0, 0.1],
            0.04 * np.eye(NUM_PARTS),
            np.zeros((NUM_PARTS, NUM_PARTS)),
        )
    )
    times = ExpectedTimes(LAYOUT, doubtful, 1.0)
    for calm, hopeful in zip(
        plans(Batch([bold]), times, DEPTHS, 0.0),
        plans(Batch([bold]), times, DEPTHS, 1.0),
        strict=True,
    ):
        assert calm.goodput == hopeful.goodput
        assert hopeful.optimistic_goodput > calm.optimistic_goodput
        assert calm.depth == 0 or calm.optimistic_goodput > calm.goodput


def test_every_depth_has_a_uniform_plan_in_order() -> None:
    found = plans(Batch([group(1, [0.5] * 3)]), times_of([1.0] * 4), DEPTHS)
    assert [(plan.depth, plan.is_uniform) for plan in found] == list(
        product(DEPTHS, [True])
    )
