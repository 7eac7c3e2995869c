"""The planner against trying everything, on batches small enough for it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.control.known_times import times_of
from vllm_mtp.acceptance import survival
from vllm_mtp.control.planner import Group, Plan, feasible, plans
from vllm_mtp.control.step_times import Times

K_MAX = 3
DEPTHS = range(K_MAX + 1)
FLAT = times_of([1.0, 1.1, 1.2, 1.3])


def value(groups: list[Group], times: Times, depth: int, lengths: list[int]) -> float:
    """Goodput of any draft lengths, one for each group; pins are kept."""
    served = [
        (g, k if g.pinned is None else g.pinned)
        for g, k in zip(groups, lengths, strict=True)
    ]
    tokens = sum(g.num_requests * (1 + sum(g.survival[:k])) for g, k in served)
    rows = sum(g.num_requests * k for g, k in served)
    num_requests = sum(g.num_requests for g in groups)
    is_uniform = {k for _, k in served} == {depth}
    return tokens / times.seconds(rows / num_requests, depth, is_uniform)


def group(num_requests: int, conditional: list[float]) -> Group:
    return Group(num_requests, survival(conditional))


# Distinct probabilities: requests that are equal share a class, so a group.
PROBABILITIES = st.lists(st.floats(0.01, 0.99), min_size=K_MAX, max_size=K_MAX)
GROUPS = st.lists(
    st.builds(group, st.integers(1, 3), PROBABILITIES), min_size=1, max_size=3
)
TIMES = st.builds(
    lambda rows, *more: times_of([1.0, *rows], *more),
    st.lists(st.floats(0.5, 3.0), min_size=K_MAX, max_size=K_MAX),
    st.floats(0.0, 0.3),
    st.floats(0.01, 0.5),
)


def has_ties(groups: list[Group]) -> bool:
    marginals = [s for g in groups for s in g.survival]
    return len(set(marginals)) < len(marginals)


def best_of(found: list[Plan]) -> Plan:
    return max(found, key=lambda plan: plan.goodput)


@settings(max_examples=200, deadline=None)
@given(GROUPS, TIMES)
def test_no_cut_through_survival_beats_the_best_plan(
    groups: list[Group], times: Times
) -> None:
    if has_ties(groups):
        return
    rest = []
    for depth in DEPTHS:
        rest.append(value(groups, times, depth, [depth] * len(groups)))
        marginals = sorted(s for g in groups for s in g.survival[:depth])
        for cut in marginals if len(groups) > 1 else ():
            lengths = [sum(s >= cut for s in g.survival[:depth]) for g in groups]
            rest.append(value(groups, times, depth, lengths))
    best = best_of(plans(groups, times, DEPTHS)).goodput
    assert best == pytest.approx(max(rest), rel=1e-9)


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
    pairs = list(zip(groups, lengths, strict=True))
    rows = sum(g.num_requests * k for g, k in pairs)
    tokens = sum(g.num_requests * sum(g.survival[:k]) for g, k in pairs)
    for plan in plans(groups, FLAT, DEPTHS):
        served = [plan.draft_length(g.survival) for g in groups]
        planned = sum(g.num_requests * k for g, k in zip(groups, served, strict=True))
        if plan.depth >= depth and planned == rows:
            base = sum(g.num_requests for g in groups)
            assert plan.tokens - base >= tokens - 1e-9


@settings(max_examples=200, deadline=None)
@given(GROUPS, TIMES)
def test_a_plan_says_what_its_draft_lengths_are_worth(
    groups: list[Group], times: Times
) -> None:
    if has_ties(groups):
        return
    for plan in plans(groups, times, DEPTHS):
        lengths = [plan.draft_length(g.survival) for g in groups]
        assert max(lengths) <= plan.depth
        if plan.is_uniform or set(lengths) != {plan.depth}:
            worth = value(groups, times, plan.depth, lengths)
            assert plan.goodput == pytest.approx(worth, rel=1e-6)
        acceptance_lengths = [
            1 + sum(g.survival[:k]) for g, k in zip(groups, lengths, strict=True)
        ]
        assert plan.worst_acceptance_length == pytest.approx(min(acceptance_lengths))
        latency = plan.seconds / min(acceptance_lengths)
        assert plan.worst_token_latency_s == pytest.approx(latency)


def test_where_verification_is_dear_only_the_likely_are_drafted_for() -> None:
    good, bad = group(4, [0.9, 0.9, 0.9]), group(4, [0.1, 0.1, 0.1])
    plan = best_of(plans([good, bad], times_of([1.0, 1.6, 2.2, 2.8]), DEPTHS))
    assert plan.draft_length(good.survival) > 0
    assert plan.draft_length(bad.survival) == 0


def test_a_dip_in_the_times_is_found() -> None:
    """Four rows cheaper than two or three: K = 3 although K = 1 and K = 2 lose."""
    times = times_of([1.0, 1.9, 1.9, 1.05], draft=0.05)
    assert best_of(plans([group(1, [0.5, 0.5, 0.5])], times, DEPTHS)).depth == 3


def test_drafting_deeper_for_a_few_is_found_though_it_does_not_pay_for_all() -> None:
    deepest = 8
    times = times_of([1.0 + 0.3 * k for k in range(deepest + 1)], draft=0.01)
    sure, vain = group(6, [0.98] * deepest), group(58, [0.05] * deepest)
    plan = best_of(plans([sure, vain], times, range(deepest + 1)))
    assert plan.depth == deepest
    assert plan.draft_length(sure.survival) == deepest
    assert plan.draft_length(vain.survival) == 0


def test_nothing_accepted_means_nothing_drafted() -> None:
    groups = [group(3, [0.01, 0.01, 0.01]), group(2, [0.02, 0.01, 0.01])]
    assert best_of(plans(groups, FLAT, DEPTHS)).depth == 0


def test_only_allowed_depths_are_planned() -> None:
    groups = [group(2, [0.9] * 3), group(1, [0.5] * 3)]
    assert [plan.depth for plan in plans(groups, FLAT, (0, 2))] == [0, 2]


def test_where_steps_are_graphs_all_plans_are_uniform() -> None:
    groups = [group(2, [0.9] * 3), group(1, [0.1] * 3)]
    times = times_of([1.0, 1.4, 1.8, 2.2])
    assert not all(plan.is_uniform for plan in plans(groups, times, DEPTHS))
    found = plans(groups, times, DEPTHS, may_mix=False)
    assert [plan.depth for plan in found] == [*DEPTHS]
    assert all(plan.is_uniform for plan in found)
    # Ranks that must draft equally deep can be off by verifying nothing alone.
    dear = times_of([1.0, 3.0, 5.0, 7.0])
    (only,) = plans(groups, dear, (2,), may_mix=False)
    assert only.depth == 2
    assert [only.draft_length(g.survival) for g in groups] == [0, 0]


@given(st.integers(0, K_MAX), st.integers(1, 3), GROUPS, TIMES)
@settings(max_examples=100, deadline=None)
def test_pinned_requests_set_the_least_depth_and_are_counted(
    pin: int, num_pinned: int, groups: list[Group], times: Times
) -> None:
    if has_ties(groups):
        return
    batch = [*groups, Group(num_pinned, survival([0.7] * K_MAX), pin)]
    found = plans(batch, times, DEPTHS)
    assert {plan.depth for plan in found} == set(range(pin, K_MAX + 1))
    for plan in found:
        lengths = [plan.draft_length(g.survival) for g in batch]
        served = {*lengths[:-1], pin}
        if plan.is_uniform or served != {plan.depth}:
            worth = value(batch, times, plan.depth, lengths)
            assert plan.goodput == pytest.approx(worth, rel=1e-6)


def test_a_batch_of_pinned_requests_only_has_a_plan() -> None:
    pinned = [Group(2, [0.8] * 3, 1), Group(1, [0.5] * 3, 3)]
    (plan,) = plans(pinned, FLAT, DEPTHS)
    assert plan.depth == 3
    assert plan.tokens == pytest.approx(2 * 1.8 + 1 + 1.5)


def test_plans_that_make_a_request_wait_too_long_are_left_out() -> None:
    found = plans([group(1, [0.5] * 3), group(1, [0.9] * 3)], FLAT, DEPTHS)
    slowest = max(plan.worst_token_latency_s for plan in found)
    kept = feasible(found, slowest - 1e-9)
    assert 0 < len(kept) < len(found)
    assert len(feasible(found, 1e-9)) == 1, "the least latency, where none keeps it"
    assert feasible(found, None) == found
