"""A request that fixes its draft length gets it from every controller."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mtp.control.controller import Controller
from vllm_mtp.control.fixed import FixedController
from vllm_mtp.control.goodput import GoodputController
from vllm_mtp.control.randomized import RandomController
from vllm_mtp.control.threshold import ThresholdController
from vllm_mtp.records import DecodeRequest, RequestOutcome, StepOutcome

K_MAX = 4
CONTROLLERS: dict[str, Callable[[], Controller]] = {
    "goodput": lambda: GoodputController(K_MAX),
    "threshold": lambda: ThresholdController(K_MAX),
    "fixed": lambda: FixedController(K_MAX),
    "random": lambda: RandomController(K_MAX, 3),
}
ALL = pytest.mark.parametrize("name", CONTROLLERS)

PIN = st.one_of(st.none(), st.integers(-1, K_MAX + 3))


def requests_of(pins: list[int | None]) -> list[DecodeRequest]:
    return [
        DecodeRequest(f"r{i}", 100, pinned_draft_length=pin)
        for i, pin in enumerate(pins)
    ]


def step(
    controller: Controller, requests: list[DecodeRequest], accepts: bool = True
) -> dict[str, int]:
    """Decide, and observe a step in which all or none of it was accepted."""
    may_draft = controller.may_draft()
    decision = controller.decide(requests)
    lengths = dict(decision.num_draft_tokens)
    assert set(lengths) == {request.request_id for request in requests}
    assert all(0 <= k <= decision.draft_depth <= K_MAX for k in lengths.values())
    is_pinned = any(request.pinned_draft_length for request in requests)
    assert may_draft or is_pinned or decision.draft_depth == 0
    outcomes = tuple(
        RequestOutcome(i, k, k if accepts else 0) for i, k in lengths.items() if k
    )
    rows = len(requests) + sum(lengths.values())
    if requests:
        controller.observe(
            StepOutcome(
                outcomes,
                len(requests),
                rows,
                0.01 * (1 + 0.05 * rows),
                decision.draft_depth,
                len(requests),
                num_context_tokens=100 * len(requests),
            )
        )
    return lengths


@ALL
@settings(deadline=None)
@given(st.lists(st.lists(PIN, max_size=6), min_size=1, max_size=12), st.booleans())
def test_pins_are_kept_whatever_else_is_decided(
    name: str, steps: list[list[int | None]], accepts: bool
) -> None:
    """The same request may even change its mind."""
    controller = CONTROLLERS[name]()
    for pins in steps:
        lengths = step(controller, requests_of(pins), accepts)
        for i, pin in enumerate(pins):
            if pin is not None:
                assert lengths[f"r{i}"] == min(max(pin, 0), K_MAX)


@ALL
def test_others_get_what_they_would_have_got(name: str) -> None:
    with_pins, without = CONTROLLERS[name](), CONTROLLERS[name]()
    pins: list[int | None] = [None, None, None, None]
    for number in range(30):
        plain = without.decide(requests_of(pins)).num_draft_tokens
        pinned = with_pins.decide(requests_of([*pins[:3], number % (K_MAX + 1)]))
        if name != "goodput" or number == 0:
            assert {i: pinned.num_draft_tokens[i] for i in ("r0", "r1", "r2")} == {
                i: plain[i] for i in ("r0", "r1", "r2")
            }


@ALL
def test_pins_at_zero_beside_others_do_not_stop_them(name: str) -> None:
    controller = CONTROLLERS[name]()
    free, off = [], []
    for _ in range(60):
        lengths = step(controller, requests_of([None, 0]))
        free.append(lengths["r0"])
        off.append(lengths["r1"])
    assert set(off) == {0}
    assert sum(free) > 60


def test_when_all_are_pinned_to_zero_goodput_does_not_draft() -> None:
    controller = GoodputController(K_MAX)
    for _ in range(200):
        decision = controller.decide(requests_of([0, 0, 0]))
        assert decision.draft_depth == 0


def test_a_pin_deepens_the_draft_of_a_controller_that_is_off() -> None:
    controller = GoodputController(K_MAX)
    for _ in range(300):
        step(controller, requests_of([None, None]), accepts=False)
    assert controller.plan is not None
    assert controller.plan.depth == 0
    for _ in range(20):
        lengths = step(controller, requests_of([None, 3]), accepts=False)
        assert lengths["r1"] == 3


def test_a_fixed_depth_never_varies_because_other_ranks_rely_on_it() -> None:
    controller = FixedController(3)
    depths = {
        controller.decide(requests_of(pins)).draft_depth
        for pins in ([None], [0, 0], [7, None], [])
    }
    assert depths == {3}
    assert controller.decide(requests_of([7])).num_draft_tokens == {"r0": 3}


def test_decisions_say_who_made_them() -> None:
    reasons = {
        name: make().decide(requests_of([None])).reason
        for name, make in CONTROLLERS.items()
    }
    assert reasons["fixed"] == "fixed"
    assert reasons["random"] == "random"
    assert reasons["threshold"] == "threshold"
    assert reasons["goodput"] in {"exploit", "explore", "off"}
