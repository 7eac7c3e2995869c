"""Which plan is tried next."""

from itertools import pairwise
from typing import Any

import pytest

from vllm_mtp.control.exploration import ExplorationOptions
from vllm_mtp.control.planner import Plan
from vllm_mtp.control.probing import Probing, Situation
from vllm_mtp.control.step_times import Estimate
from vllm_mtp.records import DecodeRequest

MARGIN = 0.03


class KnownTimes:
    """What a plain step takes is known well; of others nobody asks while drafting."""

    guesses_plain = False

    def uniform(self, draft_length: int, depth: int) -> Estimate:
        assert (draft_length, depth) == (0, 0)
        return Estimate(0.020, 0.02)


class UnsureTimes(KnownTimes):
    """It was known well long ago."""

    def uniform(self, draft_length: int, depth: int) -> Estimate:
        return Estimate(0.020, 0.08)


KNOWN_TIMES: Any = KnownTimes()


class GuessedTimes:
    """A plain step was never seen, and may well take two thirds of what is thought."""

    guesses_plain = True

    def uniform(self, draft_length: int, depth: int) -> Estimate:
        return Estimate(0.020, 0.15)


class LineTimes:
    def uniform(self, draft_length: int, depth: int) -> Estimate:
        return Estimate(0.020 + 0.001 * draft_length + 0.001 * depth, 0.01)

    def undrafted(self, draft_tokens: float, is_uniform: bool) -> Estimate:
        return Estimate(0.021 + 0.001 * draft_tokens, 0.01)


def batch(unseen: list[int]) -> list[DecodeRequest]:
    return [DecodeRequest(f"r{i}", 500, True, None, n) for i, n in enumerate(unseen)]


def plan(depth: int, goodput: float, with_luck: float) -> Plan:
    return Plan(depth, 0.0, goodput * 0.02, 0.02, with_luck)


@pytest.mark.parametrize(
    ("other", "is_tried"),
    [
        (plan(0, 79.0, with_luck=98.5), True),
        (plan(0, 79.0, with_luck=97.5), False),
        (plan(0, 81.0, with_luck=81.5), True),
        (plan(2, 97.0, with_luck=104.0), True),
        (plan(2, 97.0, with_luck=102.0), False),
    ],
)
def test_a_plan_is_tried_that_would_be_changed_to_with_luck(
    other: Plan, is_tried: bool
) -> None:
    """K = 0 is changed to for less than another depth is, so it is tried for less, and
    where it is nearly as good without luck, too."""
    probing = Probing(ExplorationOptions(), MARGIN, compares_drafts=False)
    now = Situation(plan(1, 100.0, with_luck=110.0), KNOWN_TIMES, (), 0.0)
    probing.look_for([now.plan, other], now)
    probe = probing.step(now)
    assert (probe is not None and probe.plan == other) == is_tried


@pytest.mark.parametrize(("goodput", "is_tried"), [(70.0, True), (67.0, False)])
def test_not_drafting_is_tried_where_its_time_is_a_guess(
    goodput: float, is_tried: bool
) -> None:
    """If three deviations of luck would make it as good."""
    guessed: Any = GuessedTimes()
    found = [plan(1, 100.0, with_luck=110.0), plan(0, goodput, with_luck=80.0)]
    for times, expected in ((KNOWN_TIMES, False), (guessed, is_tried)):
        probing = Probing(ExplorationOptions(), MARGIN, compares_drafts=False)
        now = Situation(found[0], times, (), 0.0)
        probing.look_for(found, now)
        assert (probing.step(now) is not None) == expected


def test_not_drafting_is_tried_before_other_depths_but_not_twice_in_a_row() -> None:
    """However much more the other one promises."""
    probing = Probing(ExplorationOptions(), MARGIN, compares_drafts=False)
    now = Situation(plan(1, 100.0, with_luck=110.0), KNOWN_TIMES, (), 0.0)
    found = [now.plan, plan(0, 96.0, with_luck=99.0), plan(2, 99.0, with_luck=130.0)]
    tried = []
    for _ in range(4):
        probing.look_for(found, now)
        probe = probing.step(now)
        assert probe is not None
        tried.append(probe.plan.depth)
        while not probing.is_over:
            probing.step(now)
    assert tried == [0, 2, 0, 2]


def test_not_drafting_is_tried_again_where_it_is_nearly_as_good() -> None:
    """Also when nothing else is worth a try, but not one time after the other."""
    probing = Probing(ExplorationOptions(), MARGIN, compares_drafts=False)
    now = Situation(plan(1, 100.0, with_luck=110.0), KNOWN_TIMES, (), 0.0)
    for repeat in range(3):
        probing.look_for([now.plan, plan(0, 90.0, with_luck=91.0)], now)
        if repeat:
            assert probing.step(now) is None
            for _ in range(8):
                probing.budget.earn()
            probing.look_for([now.plan, plan(0, 90.0, with_luck=91.0)], now)
        probe = probing.step(now)
        assert probe is not None
        assert probe.plan.depth == 0
        while not probing.is_over:
            probing.step(now)


@pytest.mark.parametrize("compares_drafts", [True, False])
def test_from_off_a_probe_waits_for_requests_that_need_little_catching_up(
    compares_drafts: bool,
) -> None:
    """As long as requests begin often: of long ones later tokens count as well."""
    options = ExplorationOptions(grant_lasts_steps=0, pause_steps=0)
    times: Any = LineTimes()
    for life, most_unseen in ((40, 2), (400, 400)):
        probing = Probing(options, MARGIN, compares_drafts)
        probed = []
        for step in range(16000):
            requests = batch([step % life] * 8)
            now = Situation(plan(0, 50.0, 50.0), times, requests, 2e-4)
            probing.look_for([now.plan, plan(1, 40.0, with_luck=60.0)], now)
            probing.budget.earn(is_comparing=True)
            if probing.may_draft_while_off(now):
                assert probing.step(now) is not None, "announced"
                probed.append(step % life)
        assert len(probed) > 20
        assert max(probed) <= most_unseen
        assert (max(probed) > 96) == (life > 96)


@pytest.mark.parametrize(("num_requests", "share"), [(32, 0.25), (4, 1.0)])
def test_a_look_costs_its_two_steps(num_requests: int, share: float) -> None:
    """The MTP layers pass over all rows of both, whoever has a draft."""
    options = ExplorationOptions(grant_lasts_steps=0, pause_steps=0)
    probing = Probing(options, MARGIN, compares_drafts=False)
    times: Any = LineTimes()
    off = Plan(0, 0.0, num_requests, 0.02, 50.0 * num_requests)
    look = Plan(1, 0.0, 1.1 * num_requests, 0.03, 51.0 * num_requests)
    now = Situation(off, times, batch([0] * num_requests), 0.0)
    probing.look_for([now.plan, look], now)
    before = probing.budget.saved_steps
    assert probing.step(now) is not None
    drafting, verifying = 1 / 20, (1 + share) / 20
    accepted = 0.1 * share
    price = drafting + verifying - accepted
    assert before - probing.budget.saved_steps == pytest.approx(price)


@pytest.mark.parametrize(
    ("times", "goodput", "longest"),
    [
        (UnsureTimes(), 97.9, 16),
        (UnsureTimes(), 90.0, 16),  # with 1.5 deviations of luck it is as good
        (UnsureTimes(), 88.0, 128),
        (KnownTimes(), 97.9, 128),
    ],
)
def test_k_0_waits_less_for_its_turn_where_its_time_is_not_known_well(
    times: Any, goodput: float, longest: int
) -> None:
    """Where it may be as good, after many trials that changed nothing."""
    options = ExplorationOptions(grant_lasts_steps=0)
    probing = Probing(options, MARGIN, compares_drafts=False)
    now = Situation(plan(1, 100.0, with_luck=110.0), times, (), 0.0)
    begun_at = []
    for step in range(1000):
        was_over = probing.is_over
        if was_over:
            probing.look_for([now.plan, plan(0, goodput, with_luck=98.0)], now)
        probing.budget.earn()
        if probing.step(now) is not None and was_over:
            begun_at.append(step)
    assert max(b - a for a, b in pairwise(begun_at)) == longest


def test_after_a_surprise_no_probe_waits() -> None:
    options = ExplorationOptions(grant_lasts_steps=0)
    probing = Probing(options, MARGIN, compares_drafts=False)
    times: Any = LineTimes()
    now = Situation(plan(0, 50.0, with_luck=50.0), times, batch([40, 40]), 2e-4)
    probing.budget.surprise()
    probing.look_for([now.plan, plan(1, 40.0, with_luck=60.0)], now)
    assert probing.may_draft_while_off(now)


@pytest.mark.parametrize(
    ("survival", "num_steps"), [(0.02, 1), (0.08, 1), (0.09, 16), (0.12, 16)]
)
def test_drafting_is_tried_for_a_while_where_it_costs_next_to_nothing(
    survival: float, num_steps: int
) -> None:
    """And the shortest of what does: later positions are what is known least of."""
    probing = Probing(ExplorationOptions(), MARGIN, compares_drafts=True)
    times: Any = LineTimes()
    now = Situation(plan(0, 50.0, with_luck=50.0), times, batch([0]), 0.0)
    others = [Plan(k, 0.0, 1.0 + k * survival, 0.02 + 0.002 * k, 51.0) for k in (2, 1)]
    probing.look_for([now.plan, *others], now)
    assert probing.may_draft_while_off(now)
    found = [probing.step(now)]
    while not probing.is_over:
        found.append(probing.step(now))
    assert len(found) == num_steps
    assert {probe and probe.plan.depth for probe in found} == {1}
    assert {probe and probe.compares for probe in found} == {num_steps == 1}


@pytest.mark.parametrize(("survival", "num_steps"), [(0.02, 5), (0.05, 16)])
def test_a_trial_that_brings_less_than_was_hoped_ends_early(
    survival: float, num_steps: int
) -> None:
    """Drafting is believed to cost 10 % when, after four steps, less is accepted."""
    probing = Probing(ExplorationOptions(), MARGIN, compares_drafts=True)
    times: Any = LineTimes()
    now = Situation(plan(0, 50.0, with_luck=50.0), times, batch([0]), 0.0)
    probing.look_for([now.plan, Plan(1, 0.0, 1.09, 0.022, 51.0)], now)
    assert probing.may_draft_while_off(now)
    found = [probing.step(now)]
    while not probing.is_over:
        found.append(probing.step(now))
        if len(found) == 5:
            disappointing = Plan(1, 0.0, 1.0 + survival, 0.022, 51.0)
            probing.look_for([now.plan, disappointing], now)
    assert len(found) == num_steps


def test_far_is_what_does_not_pay_even_with_luck() -> None:
    far = []
    times: Any = LineTimes()
    for with_luck, num_requests in ((94.0, 8), (96.0, 8), (94.0, 1)):
        probing = Probing(ExplorationOptions(), MARGIN, compares_drafts=True)
        now = Situation(plan(0, 100.0, 100.0), times, batch([0] * num_requests), 0.0)
        probing.look_for([now.plan, plan(1, 80.0, with_luck=with_luck)], now)
        far.append(probing.is_far)
    assert far == [True, False, False]
