"""Scoring: the oracle is never beaten, and a decision pays for what it causes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.control.synthetic import World
from benchmarks.control.synthetic_acceptance import AcceptanceLaw, geometric
from benchmarks.control.synthetic_cost import CPU_TABLE
from benchmarks.control.synthetic_worlds import COSTS, WORLDS
from benchmarks.control.trace_oracle import best_decision, expected, expected_uniform
from benchmarks.control.trace_replay import Replay, make_named_controller, replay
from benchmarks.control.trace_world import Truth
from vllm_mtp.config import ConfigError
from vllm_mtp.control.fixed import FixedController
from vllm_mtp.records import DecodeRequest, DraftDecision, StepOutcome

K_MAX = 4
ALONE = World("alone", AcceptanceLaw((geometric(0.8),)), CPU_TABLE)


@st.composite
def truths(draw: st.DrawFn, max_requests: int = 5) -> Truth:
    num_requests = draw(st.integers(1, max_requests))
    rows = st.lists(st.floats(0, 1), min_size=K_MAX, max_size=K_MAX)
    conditional = np.array([draw(rows) for _ in range(num_requests)])
    ids = [str(i) for i in range(num_requests)]
    return Truth(ids, np.cumprod(conditional, axis=1), 1000.0)


@settings(max_examples=200, deadline=None)
@given(truths(), st.sampled_from(sorted(COSTS)), st.data())
def test_no_decision_beats_the_oracle(
    truth: Truth, machine: str, data: st.DataObject
) -> None:
    cost = COSTS[machine]
    depth = data.draw(st.integers(0, K_MAX))
    lengths = {i: data.draw(st.integers(0, depth)) for i in truth.request_ids}
    chosen = expected(truth, cost, DraftDecision(depth, lengths))
    best = best_decision(truth, cost)
    assert chosen.goodput <= best.goodput * (1 + 1e-9)
    assert 1 <= chosen.tokens / truth.num_requests <= depth + 1


@settings(max_examples=60, deadline=None)
@given(truths(max_requests=2), st.sampled_from(sorted(COSTS)))
def test_the_oracle_is_the_best_of_all_decisions(truth: Truth, machine: str) -> None:
    cost = COSTS[machine]
    every = itertools.product(range(K_MAX + 1), repeat=truth.num_requests)
    decisions = [
        DraftDecision(max(lengths), dict(zip(truth.request_ids, lengths, strict=True)))
        for lengths in every
    ]
    best = max(expected(truth, cost, decision).goodput for decision in decisions)
    assert best_decision(truth, cost).goodput == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("machine", sorted(COSTS))
def test_the_oracle_drafts_for_a_sure_request_and_not_for_a_hopeless_one(
    machine: str,
) -> None:
    survival = np.array([[1.0] * K_MAX, [0.0] * K_MAX])
    best = best_decision(Truth(["sure", "hopeless"], survival, 0.0), COSTS[machine])
    assert (best.depth, best.tokens) == (K_MAX, 2 + K_MAX)


@given(truths(), st.integers(0, K_MAX))
def test_a_uniform_decision_has_the_value_of_the_table(
    truth: Truth, length: int
) -> None:
    decision = DraftDecision(length, dict.fromkeys(truth.request_ids, length))
    found = expected_uniform(truth, CPU_TABLE)[length]
    assert found == pytest.approx(expected(truth, CPU_TABLE, decision))


def test_regret_is_the_share_of_time_that_the_oracle_would_not_have_needed() -> None:
    run = Replay("w", "c", 0)
    run.steps = [1, 2, 4]
    for tokens, seconds in ((2.0, 1.0), (1.0, 1.0), (6.0, 2.0)):
        run.chosen.add(tokens, seconds)
    for goodput in (4.0, 1.0, 6.0):  # tokens per second
        run.oracle.add(3.0 * goodput, 3.0)
    # The oracle needs 2 / 4, 1 / 1 and 6 / 6 seconds for those tokens.
    assert run.regret() == pytest.approx(1 - 2.5 / 4)
    assert run.regret(1, 2) == pytest.approx(0.0)
    assert run.regret_after(2, 3) == pytest.approx(1 - 2 / 3)
    assert run.regret_after(2, 4) is None


@pytest.mark.parametrize("length", [0, 1, 8])
def test_a_fixed_draft_length_is_as_fast_as_itself(length: int) -> None:
    run = replay(ALONE, FixedController(length), 200)
    assert run.over_uniform(length) == pytest.approx(1.0)
    assert set(run.depths) == {length}


def test_where_nothing_varies_the_best_fixed_draft_length_has_no_regret() -> None:
    best = replay(ALONE, FixedController(0), 50).best_uniform()
    assert best > 0
    run = replay(ALONE.changed(prompt_tokens=8), FixedController(best), 200)
    assert run.regret() == pytest.approx(0.0, abs=1e-9)
    assert run.best_uniform() == best
    worse = replay(ALONE, FixedController(0), 200)
    assert worse.regret() > 0.3


class _OnAndOff:
    """Drafts one token in every third step."""

    def __init__(self) -> None:
        self.step = 0

    def may_draft(self) -> bool:
        return True

    def decide(self, requests: list[DecodeRequest]) -> DraftDecision:
        self.step += 1
        depth = int(self.step % 3 == 0)
        return DraftDecision(depth, {r.request_id: depth for r in requests})

    def observe(self, outcome: StepOutcome) -> None:
        pass


def test_resuming_is_charged_with_the_catch_up_pass() -> None:
    row_s = 10 * CPU_TABLE.catch_up_row_s
    dearer = ALONE.changed(cost=replace(CPU_TABLE, catch_up_row_s=row_s))
    runs = [replay(world, _OnAndOff(), 400) for world in (ALONE, dearer)]
    assert runs[0].depths == runs[1].depths
    assert runs[0].oracle.seconds == runs[1].oracle.seconds
    # Every third step resumes after two without drafts: the first of them had drafts to
    # verify, the MTP layers missed the token of the second.
    num_resumed = runs[0].depths[1:].count(1)
    extra_s = runs[1].chosen.total_s() - runs[0].chosen.total_s()
    per_token_s = row_s - CPU_TABLE.catch_up_row_s
    assert num_resumed > 120
    # But where the request has just ended.
    assert 0.95 <= extra_s / per_token_s / num_resumed <= 1.0


def test_a_replay_repeats_itself_and_its_seed_matters() -> None:
    world = WORLDS["cpu-4-tuned"]

    def run(seed: int) -> Replay:
        return replay(world, make_named_controller("goodput", 8), 150, seed)

    first, again, other = run(1), run(1), run(2)
    assert first.chosen.seconds == again.chosen.seconds
    assert first.elapsed_s == again.elapsed_s
    assert first.elapsed_s != other.elapsed_s


class _Disobedient(_OnAndOff):
    """Drafts although it said that it would not."""

    def may_draft(self) -> bool:
        return False


def test_a_controller_must_not_draft_after_it_said_that_it_would_not() -> None:
    with pytest.raises(AssertionError):
        replay(ALONE, _Disobedient(), 10)


@pytest.mark.parametrize("name", ["best", "fixed", "fixed-", "fixed-9", "fixed--1"])
def test_an_unknown_controller_is_refused_with_the_names_that_exist(name: str) -> None:
    with pytest.raises(ConfigError, match="goodput, threshold, random or fixed-K"):
        make_named_controller(name, 8)


def test_fixed_controllers_are_named_by_their_draft_length() -> None:
    controller = make_named_controller("fixed-3", 8)
    assert controller.decide([DecodeRequest("a", 1)]).draft_depth == 3
