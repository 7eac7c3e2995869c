"""The budget of probes: what is spent never exceeds what was earned."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mtp.control.exploration import ExplorationBudget, ExplorationOptions

OPTIONS = ExplorationOptions(grant_lasts_steps=20)


def past_grant(options: ExplorationOptions = OPTIONS) -> ExplorationBudget:
    """A budget whose grant is spent and whose pause is over."""
    budget = ExplorationBudget(options)
    while budget.saved_steps >= 1.0:
        assert budget.pay(1.0)
    for _ in range(options.grant_lasts_steps + options.pause_steps):
        budget.earn()
    return budget


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, OPTIONS.max_saved_steps), st.booleans()), max_size=300
    )
)
def test_what_probes_cost_is_bounded_whatever_happens(
    steps: list[tuple[float, bool]],
) -> None:
    budget = ExplorationBudget(OPTIONS)
    spent = 0.0
    for price, is_surprising in steps:
        budget.earn()
        if is_surprising:
            budget.surprise()
        if budget.can_pay(price):
            assert budget.pay(price)
            spent += price
    earned = OPTIONS.grant_steps + OPTIONS.fraction * len(steps)
    assert spent <= earned + OPTIONS.max_debt_steps + 1e-9


def test_a_probe_dearer_than_all_savings_comes_sooner_or_later() -> None:
    """Else a state that only a dear probe can leave would last for ever."""
    budget = past_grant()
    for _ in range(10_000):
        budget.earn()
    assert budget.can_pay(100.0)


def test_in_the_long_run_dear_probes_cost_no_more_than_their_fraction() -> None:
    budget, price, num_steps = ExplorationBudget(OPTIONS), 3.0, 50_000
    num_probes = 0
    for _ in range(num_steps):
        budget.earn()
        num_probes += budget.pay(price)
    assert num_probes > 50
    assert num_probes * price < 1.1 * OPTIONS.fraction * num_steps + OPTIONS.grant_steps


@settings(deadline=None)
@given(st.floats(0, OPTIONS.max_saved_steps), st.integers(0, 300), st.booleans())
def test_paying_succeeds_exactly_when_it_was_said_to(
    price: float, num_steps: int, is_surprising: bool
) -> None:
    budget = ExplorationBudget(OPTIONS)
    for _ in range(num_steps):
        budget.earn()
    if is_surprising:
        budget.surprise()
    before = budget.saved_steps
    expected = budget.can_pay(price)
    assert budget.pay(price) is expected
    assert budget.saved_steps == before - (price if expected else 0.0)


def test_the_grant_needs_no_pauses() -> None:
    budget = ExplorationBudget(OPTIONS)
    assert [budget.pay(1.0) for _ in range(5)] == [True] * 4 + [False]
    assert not budget.is_granted


def test_the_grant_ends_by_itself() -> None:
    budget = ExplorationBudget(OPTIONS)
    for _ in range(OPTIONS.grant_lasts_steps):
        assert budget.is_granted
        budget.earn()
    assert not budget.is_granted


def test_after_the_grant_probes_pause_even_where_they_are_free() -> None:
    budget = past_grant()
    gaps = []
    since = 0
    for _ in range(10 * OPTIONS.pause_steps):
        budget.earn()
        since += 1
        if budget.pay(0.0):
            gaps.append(since)
            since = 0
    assert len(gaps) > 5
    assert min(gaps[1:]) == OPTIONS.pause_steps


def test_a_surprise_allows_for_debt_which_later_probes_pay_back() -> None:
    budget = past_grant()
    assert not budget.can_pay(OPTIONS.max_debt_steps)
    budget.surprise()
    assert budget.is_urgent
    assert budget.pay(OPTIONS.max_debt_steps)
    assert budget.saved_steps < 0
    for _ in range(OPTIONS.urgent_steps):
        budget.earn()
    assert not budget.is_urgent
    assert not budget.can_pay(0.0)
    for _ in range(round(2 * OPTIONS.max_debt_steps / OPTIONS.fraction)):
        budget.earn()
    assert budget.can_pay(0.0)


def test_savings_are_limited_so_that_calm_does_not_end_in_a_burst() -> None:
    budget = past_grant()
    for _ in range(100_000):
        budget.earn()
    assert budget.saved_steps <= OPTIONS.max_saved_steps + OPTIONS.fraction


def test_a_closer_look_that_sees_nothing_ends_soon() -> None:
    budget = past_grant()
    budget.surprise()
    budget.disappoint()
    assert budget.is_urgent, "a single rejection says little"
    for _ in range(3):
        budget.disappoint()
    assert not budget.is_urgent


@pytest.mark.parametrize("price", [0.0, 0.3, 1.4, 5.0])
@pytest.mark.parametrize("num_steps_before", [0, 7, 100, 1000])
def test_nothing_is_affordable_earlier_than_announced(
    price: float, num_steps_before: int
) -> None:
    budget = past_grant()
    budget.pay(budget.saved_steps)
    for _ in range(num_steps_before):
        budget.earn()
    announced = budget.steps_until_affordable(price)
    for _ in range(announced):
        assert not budget.can_pay(price)
        budget.earn()
    # Rounding aside, not later either.
    budget.earn()
    assert budget.can_pay(price)


def test_a_look_that_is_overdue_is_granted_on_credit_within_limits() -> None:
    """Or drafting would stay off for as long as catching up gets dearer."""
    budget = past_grant()
    budget.pay(budget.saved_steps)
    num_looks, since, spent = 0, 0, 0.0
    for _ in range(1000):
        budget.earn(is_comparing=True)
        since += 1
        price = 0.2 + 0.003 * since
        if budget.pay(price):
            num_looks, since, spent = num_looks + 1, 0, spent + price
    assert num_looks >= 10
    assert budget.saved_steps > -OPTIONS.max_saved_steps
    assert spent <= 1000 * OPTIONS.comparing_fraction + OPTIONS.max_saved_steps


def test_a_pressing_probe_is_granted_on_credit_within_limits() -> None:
    """Not drafting is tried, whatever looks have cost before."""
    budget = past_grant()
    budget.saved_steps = -0.5
    assert not budget.can_pay(0.1)
    assert budget.can_pay(0.1, is_pressing=True)
    budget.saved_steps = -OPTIONS.max_saved_steps
    assert not budget.can_pay(0.1, is_pressing=True)


def test_after_a_surprise_nothing_is_announced() -> None:
    budget = past_grant()
    budget.pay(budget.saved_steps)
    assert budget.steps_until_affordable(1.0) > 0
    budget.surprise()
    assert budget.steps_until_affordable(1.0) == 0


def test_where_nothing_is_nearly_good_enough_half_is_spent() -> None:
    options = ExplorationOptions(grant_steps=0.0)
    saved = {}
    for is_far in (False, True):
        budget = ExplorationBudget(options)
        for _ in range(100):
            budget.earn(is_comparing=True, is_far=is_far)
        saved[is_far] = budget.saved_steps
    assert saved[False] == pytest.approx(100 * options.comparing_fraction)
    assert saved[True] == pytest.approx(0.5 * saved[False])
