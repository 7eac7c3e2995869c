"""The stop rule at work: what it keeps, when it goes on, what it must not look at."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mtp.acceptance import logistic
from vllm_mtp.drafting.early_stop import EarlyStop, lower_hull
from vllm_mtp.records import DraftChances, StopRule

DEPTH = 5


def rule(
    log_odds: dict[str, list[float]],
    row_price: float = 0.3,
    step_price: float = 0.1,
    verify_prices: Sequence[float] | None = None,
    slope: float = 1.0,
) -> StopRule:
    linear = [row_price * length for length in range(DEPTH + 1)]
    chances = {
        request_id: DraftChances(
            [usual - slope for usual in position],
            slope,
            [logistic(0.8 * usual) for usual in position],
        )
        for request_id, position in log_odds.items()
    }
    return StopRule(chances, verify_prices or linear, step_price)


def draft(stop: EarlyStop, confidences: Sequence[Sequence[float]]) -> int:
    """Draft until the rule ends it; returns the steps made.

    Args:
        stop: Nothing drafted yet.
        confidences: draft steps x requests.
    """
    for step, row in enumerate(confidences):
        if not goes_on(stop, row):
            return step + 1
    raise AssertionError("the rule allowed more than its depth")


def goes_on(stop: EarlyStop, confidences: Sequence[float]) -> bool:
    """Whether another step follows one with these confidences."""
    stop.extend(confidences)
    return stop.goes_on()


def survivals(
    stop_rule: StopRule, request_id: str, chain: Sequence[float]
) -> list[float]:
    """``S_j`` of one request, in plain words."""
    alive, result = 1.0, []
    for position, confidence in enumerate(chain):
        log_odds, slope, _ = stop_rule.chances[request_id]
        alive *= logistic(log_odds[position] + slope * min(confidence, 4.0))
        result.append(alive)
    return result


def test_a_sure_draft_is_made_as_deep_as_allowed_and_kept() -> None:
    stop = EarlyStop(rule({"a": [4.0] * DEPTH}), ["a"], are_drawn=False)
    assert draft(stop, [[3.0]] * DEPTH) == DEPTH
    assert stop.lengths() == [DEPTH]


def test_a_draft_without_hope_ends_after_its_first_token_which_is_not_verified() -> (
    None
):
    stop = EarlyStop(rule({"a": [-3.0] * DEPTH}), ["a"], are_drawn=False)
    assert draft(stop, [[0.0]] * DEPTH) == 1
    assert stop.lengths() == [0]


def test_one_unsure_token_ends_a_draft_that_would_have_gone_on() -> None:
    ruled = rule({"a": [1.0] * DEPTH}, slope=2.0)
    stop = EarlyStop(ruled, ["a"], are_drawn=False)
    assert draft(stop, [[2.0], [2.0], [0.0], [2.0], [2.0]]) == 3
    assert stop.lengths() == [2]
    sure = EarlyStop(ruled, ["a"], are_drawn=False)
    assert draft(sure, [[2.0]] * DEPTH) == DEPTH


def test_a_batch_goes_on_for_those_that_are_worth_it_and_keeps_what_is() -> None:
    request_ids = [f"r{i}" for i in range(6)]
    log_odds = {i: [3.0] * DEPTH for i in request_ids[:3]}
    log_odds |= {i: [-2.0] * DEPTH for i in request_ids[3:]}
    stop = EarlyStop(rule(log_odds, step_price=1.0), request_ids, are_drawn=False)
    assert draft(stop, [[1.0] * 6] * DEPTH) == DEPTH
    assert stop.lengths() == [DEPTH] * 3 + [0] * 3


def test_dear_steps_are_not_made_for_a_few() -> None:
    """The same request goes on in company and not alone."""
    log_odds = {f"r{i}": [1.0] * DEPTH for i in range(8)}
    for request_ids, wanted in ((["r0"], 1), (list(log_odds), DEPTH)):
        stop = EarlyStop(rule(log_odds, 0.0, 0.7), request_ids, are_drawn=False)
        assert draft(stop, [[1.0] * len(request_ids)] * DEPTH) == wanted


def test_requests_that_the_rule_does_not_name_get_no_draft() -> None:
    stop = EarlyStop(rule({"a": [4.0] * DEPTH}), ["other", "a"], are_drawn=False)
    draft(stop, [[4.0, 4.0]] * DEPTH)
    assert stop.lengths() == [0, DEPTH]


def test_broken_logits_end_the_draft() -> None:
    stop = EarlyStop(rule({"a": [0.0] * DEPTH}), ["a"], are_drawn=False)
    assert draft(stop, [[float("nan")]] * DEPTH) == 1
    assert stop.lengths() == [0]


def test_a_dip_in_the_price_is_used_where_drafts_are_not_drawn() -> None:
    """Three tokens cheaper to verify than one (seen on CPUs): all or nothing."""
    prices = [0.0, 0.9, 0.9, 0.3, 1.5, 2.0]
    chain = [[1.0]] * DEPTH
    usual = {"a": [0.4, 0.0, -1.0, -3.0, -3.0]}
    kept = {}
    for are_drawn in (False, True):
        stop = EarlyStop(rule(usual, verify_prices=prices), ["a"], are_drawn)
        while goes_on(stop, chain[0]):
            pass
        kept[are_drawn] = stop.lengths()[0]
    assert kept == {False: 3, True: 2}


CONFIDENCES = st.lists(st.floats(0, 6), min_size=DEPTH, max_size=DEPTH)
LOG_ODDS = st.lists(st.floats(-4, 5), min_size=DEPTH, max_size=DEPTH)
PRICES = st.lists(st.floats(-0.5, 3), min_size=DEPTH, max_size=DEPTH)


@settings(deadline=None)
@given(LOG_ODDS, CONFIDENCES, PRICES, st.integers(1, DEPTH))
def test_the_length_kept_is_the_one_that_is_worth_most(
    log_odds: list[float], chain: list[float], prices: list[float], num_steps: int
) -> None:
    ruled = rule({"a": log_odds}, verify_prices=[0.0, *prices])
    stop = EarlyStop(ruled, ["a"], are_drawn=False)
    for confidence in chain[:num_steps]:
        stop.extend([confidence])
    worth = [0.0]
    for length in range(1, num_steps + 1):
        accepted = sum(survivals(ruled, "a", chain[:length]))
        worth.append(accepted - ruled.verify_prices[length])
    assert worth[stop.lengths()[0]] == pytest.approx(max(worth))


def is_verified(
    ruled: StopRule, chain: Sequence[float], position: int, are_drawn: bool
) -> bool:
    """Whether a token is drafted, and then verified."""
    stop = EarlyStop(ruled, ["a"], are_drawn)
    draft(stop, [[confidence] for confidence in chain])
    return stop.lengths()[0] > position


@settings(deadline=None, max_examples=400)
@given(
    LOG_ODDS, CONFIDENCES, CONFIDENCES, PRICES, st.floats(-0.1, 0.5),
    st.integers(0, DEPTH - 1),
)  # fmt: skip
def test_whether_a_drawn_token_is_verified_does_not_depend_on_what_follows_it(
    log_odds: list[float],
    chain: list[float],
    other: list[float],
    prices: list[float],
    step_price: float,
    position: int,
) -> None:
    """Else tokens that promise a good continuation would be verified more often, and
    the output would follow another distribution than the target's."""
    ruled = rule({"a": log_odds}, step_price=step_price, verify_prices=[0.0, *prices])
    continued = [*chain[: position + 1], *other[position + 1 :]]
    assert is_verified(ruled, chain, position, are_drawn=True) == is_verified(
        ruled, continued, position, are_drawn=True
    )


def test_with_prices_that_dip_it_would_depend() -> None:
    """Shows that the property above can fail."""
    ruled = rule(
        {"a": [2.0] + [-1.0] * (DEPTH - 1)},
        verify_prices=[0.0, 1.5, 1.5, 1.1, 5.0, 5.0],
        step_price=0.01,
        slope=2.0,
    )
    sure, unsure = [1.0, 4.0, 4.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]
    assert is_verified(ruled, sure, 0, are_drawn=False)
    assert not is_verified(ruled, unsure, 0, are_drawn=False)


@given(st.lists(st.floats(-2, 3), min_size=1, max_size=9))
def test_the_hull_is_the_largest_convex_sequence_below(prices: list[float]) -> None:
    hull = lower_hull(prices)
    assert hull[0] == prices[0]
    assert hull[-1] == prices[-1]
    assert all(h <= p + 1e-9 for h, p in zip(hull, prices, strict=True))
    rises = np.diff(hull)
    assert (np.diff(rises) >= -1e-9).all()
    # Largest: between its corners it is a straight line, and corners are prices.
    for index in range(1, len(prices) - 1):
        is_corner = rises[index] - rises[index - 1] > 1e-9
        assert not is_corner or hull[index] == pytest.approx(prices[index])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(0.1, 0.9), min_size=1, max_size=DEPTH),
    st.lists(st.floats(0.0, 0.8), min_size=DEPTH, max_size=DEPTH),
    st.floats(-1.0, 3.0),
)
def test_a_draft_is_continued_as_far_as_it_is_worth_most(
    chances: list[float], prices: list[float], log_odds: float
) -> None:
    copies = [math.prod(chances[: place + 1]) for place in range(len(chances))]
    ruled = rule({"a": [log_odds] * DEPTH}, verify_prices=[0.0, *prices])
    ruled = replace(ruled, copies={"a": copies})
    stop = EarlyStop(ruled, ["a"], are_drawn=False)
    stop.extend([1.0])
    chain = stop.lengths()[0]
    agreed = stop.continued_lengths()[0]
    assert agreed == max(chain, 1)
    # With the first token, where it alone was not worth it.
    base = 0.0 if chain else copies[0]
    worths = [
        base
        + sum(copies[1 : number + 1])
        - ruled.verify_prices[agreed + number]
        + ruled.verify_prices[chain]
        for number in range(1, min(len(copies) - 1, DEPTH - agreed) + 1)
    ]
    length = stop.copy_lengths()[0]
    if length == chain:
        assert max(worths, default=0.0) <= 1e-9
    else:
        assert worths[length - agreed - 1] == pytest.approx(max(worths))


def test_who_is_continued_asks_for_no_further_step() -> None:
    sure = rule({"a": [3.0] * DEPTH, "b": [-2.0] * DEPTH}, step_price=0.2)
    stop = EarlyStop(replace(sure, copies={"a": [0.9]}), ["a", "b"], are_drawn=False)
    stop.extend([1.0, 1.0])
    assert stop.goes_on()
    assert stop.may_continue() == [0]
    stop.continue_from_contexts([0])
    assert not stop.goes_on()
