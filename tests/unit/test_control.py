"""The controllers: pure Python, so everything about them is shown without an engine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mtp.config import MTPPlusConfig
from vllm_mtp.control.factory import make_controller
from vllm_mtp.control.fixed import FixedController
from vllm_mtp.control.goodput import GoodputController
from vllm_mtp.control.randomized import RandomController
from vllm_mtp.control.threshold import ThresholdController
from vllm_mtp.records import DecodeRequest, RequestOutcome, StepOutcome

REQUESTS = [DecodeRequest(f"request-{i}", 10 * i) for i in range(8)]


def test_fixed_gives_every_request_the_same_draft_length() -> None:
    decision = FixedController(3).decide(REQUESTS)
    assert decision.draft_depth == 3
    assert decision.num_draft_tokens == {r.request_id: 3 for r in REQUESTS}


def test_fixed_drafts_as_deep_without_requests_because_other_ranks_may_have_some() -> (
    None
):
    assert FixedController(3).decide([]).draft_depth == 3


@given(st.integers(1, 16), st.integers(0, 2**32), st.integers(0, 8))
def test_random_never_exceeds_the_depth_nor_the_upper_bound(
    upper_bound: int, seed: int, num_requests: int
) -> None:
    controller = RandomController(upper_bound, seed)
    for _ in range(5):
        decision = controller.decide(REQUESTS[:num_requests])
        assert 0 <= decision.draft_depth <= upper_bound
        lengths = decision.num_draft_tokens
        assert set(lengths) == {r.request_id for r in REQUESTS[:num_requests]}
        assert all(0 <= k <= decision.draft_depth for k in lengths.values())


def test_random_reaches_every_length_and_whole_steps_without_drafts() -> None:
    controller = RandomController(5, seed=1)
    decisions = [controller.decide(REQUESTS) for _ in range(200)]
    assert {d.draft_depth for d in decisions} == set(range(6))
    lengths = {k for d in decisions for k in d.num_draft_tokens.values()}
    assert lengths == set(range(6))
    mixed = [d for d in decisions if len(set(d.num_draft_tokens.values())) > 1]
    assert len(mixed) > 100


def test_random_with_the_same_seed_decides_the_same() -> None:
    first, second = RandomController(5, seed=7), RandomController(5, seed=7)
    for _ in range(20):
        assert first.decide(REQUESTS) == second.decide(REQUESTS)


def test_the_option_names_the_controller() -> None:
    classes = {
        "goodput": GoodputController,
        "threshold": ThresholdController,
        "fixed": FixedController,
        "random": RandomController,
    }
    for name, expected in classes.items():
        assert type(make_controller(MTPPlusConfig(controller=name), 3)) is expected
    assert type(make_controller(MTPPlusConfig(), 3)) is GoodputController


def test_a_cpu_begins_with_beliefs_of_its_own() -> None:
    of_cpu = make_controller(MTPPlusConfig(), 3, is_cpu=True)
    other = make_controller(MTPPlusConfig(), 3)
    assert isinstance(of_cpu, GoodputController)
    assert isinstance(other, GoodputController)
    many = {
        name: controller.cost.times(16, 100.0, True).seconds(3, 3)
        for name, controller in (("cpu", of_cpu), ("other", other))
    }
    assert many["cpu"] > 2 * many["other"]


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_ranks_with_a_common_depth_never_leave_it_but_verify_what_pays(
    acceptance: float,
) -> None:
    depth = 3
    controller = make_controller(MTPPlusConfig(), depth, depths=(depth,))
    assert controller.decide([]).draft_depth == depth
    lengths = {r.request_id: 0 for r in REQUESTS}
    for _ in range(200):
        assert controller.may_draft()
        decision = controller.decide(REQUESTS)
        assert decision.draft_depth == depth
        outcomes = [
            RequestOutcome(i, k, round(k * acceptance)) for i, k in lengths.items() if k
        ]
        rows = len(REQUESTS) + sum(lengths.values())
        lengths = dict(decision.num_draft_tokens)
        controller.observe(
            StepOutcome(
                requests=tuple(outcomes),
                num_requests=len(REQUESTS),
                num_scheduled_tokens=rows,
                step_time_s=0.01 + 0.002 * rows,
                draft_depth=depth,
                num_decode_requests=len(REQUESTS),
            )
        )
    pinned = [*REQUESTS, DecodeRequest("deep", 9, pinned_draft_length=8)]
    assert controller.decide(pinned).draft_depth == depth
    assert sum(lengths.values()) == (0 if acceptance == 0.0 else depth * len(REQUESTS))


def test_an_outcome_adds_up_its_requests() -> None:
    outcome = StepOutcome(
        requests=(RequestOutcome("a", 3, 1), RequestOutcome("b", 2, 2)),
        num_requests=3,
        num_scheduled_tokens=12,
        step_time_s=0.01,
    )
    assert outcome.num_draft_tokens == 5
    assert outcome.num_accepted_tokens == 3
    assert [r.acceptance_length for r in outcome.requests] == [2, 3]
