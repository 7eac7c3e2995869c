"""What drafting is worth where only drafts of high confidence are verified."""

import math
import random
from collections.abc import Callable
from statistics import fmean

import pytest

from tests.unit.control.known_times import times_of
from vllm_mtp.acceptance import logistic
from vllm_mtp.control.goodput import GoodputController
from vllm_mtp.control.options import GoodputOptions
from vllm_mtp.control.planner import Group, Plan
from vllm_mtp.control.selective import selective_plan, split
from vllm_mtp.drafting.early_stop import EarlyStop
from vllm_mtp.records import (
    DecodeRequest,
    DraftDecision,
    RequestOutcome,
    StepOutcome,
)

K_MAX = 4
NUM_REQUESTS = 4
SURE, UNSURE = 3.0, 0.4
"""Confidences: of easy tokens, nearly all accepted, and of hard ones."""


def test_the_parts_of_a_group_accept_in_the_mean_what_it_does() -> None:
    offsets = [-2.0, -0.5, 0.5, 2.0]
    first = fmean(logistic(0.6 + offset) for offset in offsets)
    survival = [first, first / 2, first / 3]
    group = Group(2, survival, None, offsets, first_log_odds=0.6)
    parts = split(group)
    assert sum(part.num_requests for part in parts) == 2
    for position, survival in enumerate(group.survival):
        mean = fmean(part.survival[position] for part in parts)
        assert mean == pytest.approx(survival, rel=1e-2)
    for part in parts:
        assert list(part.survival) == sorted(part.survival, reverse=True)
    assert split(group._replace(offsets=())) == [(2, group.survival)]


@pytest.mark.parametrize("num_requests", [1, 4])
def test_only_what_is_worth_its_price_is_verified(num_requests: int) -> None:
    """Of the quarters 0.05, 0.05, 0.95, 0.95 the upper two."""
    distance = 2 * math.log(19)
    offsets = [-distance, -distance, 0.0, 0.0]
    group = Group(num_requests, [0.5], None, offsets, math.log(19))
    uniform = Plan(1, 0.0, 1.5 * num_requests, 0.014, 1.5)
    times = times_of([1.0, 1.4], draft=0.0, scale_s=0.01)
    plan = selective_plan([group], uniform, [0.0, 0.4], times)
    assert plan.tokens == pytest.approx(num_requests * 1.475, rel=0.01)
    assert plan.seconds == pytest.approx(0.012)
    assert plan.depth == 1
    assert not plan.is_uniform
    assert plan.goodput > uniform.goodput
    dear = selective_plan([group], uniform, [0.0, 0.99], times)
    assert dear.tokens == num_requests
    assert dear.seconds == pytest.approx(0.01)


class ScoredEngine:
    """Four greedy requests whose worker follows rules, as vLLM's V1 runner does."""

    def __init__(self, share_easy: Callable[[int], float], is_telling: bool) -> None:
        options = GoodputOptions(sees_shadow_drafts=True, stops_early=True)
        self.controller = GoodputController(K_MAX, options)
        self.share_easy = share_easy
        """Of tokens, by step."""
        self.is_telling = is_telling
        """Whether confidences say which are easy."""
        self.rng = random.Random(0)
        self.decisions: list[DraftDecision] = []
        self.goodputs: list[tuple[int, float]] = []
        """Tokens and seconds of each step, without noise."""
        self._easy: list[list[bool]] = [[] for _ in range(NUM_REQUESTS)]
        self._scores: list[tuple[float, ...]] = [() for _ in range(NUM_REQUESTS)]
        self._lengths = [0] * NUM_REQUESTS

    def run(self, num_steps: int) -> "ScoredEngine":
        ids = [f"r{i}" for i in range(NUM_REQUESTS)]
        requests = [DecodeRequest(request_id, 200) for request_id in ids]
        for step in range(len(self.decisions), len(self.decisions) + num_steps):
            self.controller.may_draft()
            decision = self.controller.decide(requests)
            outcomes = [
                RequestOutcome(ids[i], k, self._accepted(i, k), self._scores[i])
                for i, k in enumerate(self._lengths)
            ]
            compared = [
                RequestOutcome(ids[i], 1, self._accepted(i, 1), self._scores[i][:1])
                for i, k in enumerate(self._lengths)
                if not k and self._scores[i]
            ]
            depth = self._draft(step, decision, ids)
            rows = NUM_REQUESTS + sum(o.num_draft_tokens for o in outcomes)
            # A draft step takes 10 % of a step, a row of every request 40 %.
            seconds = 0.03 * (1.0 + 0.1 * depth + 0.4 * (rows / NUM_REQUESTS - 1))
            self.controller.observe(
                StepOutcome(
                    tuple(o for o in outcomes if o.num_draft_tokens),
                    NUM_REQUESTS,
                    rows,
                    seconds * self.rng.lognormvariate(0, 0.03),
                    depth,
                    NUM_REQUESTS,
                    num_context_tokens=200 * NUM_REQUESTS,
                    shadow_drafts=tuple(compared),
                )
            )
            tokens = NUM_REQUESTS + sum(o.num_accepted_tokens for o in outcomes)
            self.goodputs.append((tokens, seconds))
            self.decisions.append(decision)
        return self

    def _accepted(self, request: int, length: int) -> int:
        accepted = 0
        for easy in self._easy[request][:length]:
            if self.rng.random() > (0.97 if easy else 0.03):
                break
            accepted += 1
        return accepted

    def _draft(self, step: int, decision: DraftDecision, ids: list[str]) -> int:
        rule, depth = decision.stop_rule, 0
        stop = None if rule is None else EarlyStop(rule, ids, are_drawn=False)
        easy: list[list[bool]] = [[] for _ in ids]
        scores: list[list[float]] = [[] for _ in ids]
        goes_on = decision.draft_depth > 0
        while goes_on:
            for request in range(NUM_REQUESTS):
                is_easy = self.rng.random() < self.share_easy(step)
                seems = is_easy if self.is_telling else self.rng.random() < 0.5
                easy[request].append(is_easy)
                scores[request].append(SURE if seems else UNSURE)
            depth += 1
            if stop is not None:
                stop.extend([each[-1] for each in scores])
                goes_on = stop.goes_on()
            goes_on &= depth < decision.draft_depth
        self._easy, self._scores = easy, [tuple(each) for each in scores]
        self._lengths = [decision.num_draft_tokens[request_id] for request_id in ids]
        if stop is not None:
            self._lengths = stop.lengths()
        return depth

    def over_off(self, first: int, last: int) -> float:
        tokens, seconds = zip(*self.goodputs[first:last], strict=True)
        return sum(tokens) / NUM_REQUESTS * 0.03 / sum(seconds)

    def share_drafting(self, first: int, last: int) -> float:
        return fmean(d.draft_depth > 0 for d in self.decisions[first:last])


def test_it_drafts_where_only_the_choice_makes_it_pay() -> None:
    """Verifying all, 45 % accepted for 50 % more time; verifying what is easy, 44 %
    for 28 %."""
    engine = ScoredEngine(lambda step: 0.45, is_telling=True).run(2000)
    assert engine.share_drafting(500, 2000) > 0.9
    assert engine.over_off(500, 2000) > 1.08


def test_where_confidence_says_nothing_little_is_lost() -> None:
    """Drafting would lose 3 %, which is within what is known of acceptance."""
    engine = ScoredEngine(lambda step: 0.45, is_telling=False).run(2000)
    assert engine.share_drafting(500, 2000) < 0.7
    assert engine.over_off(500, 2000) > 0.97


def test_texts_that_are_hard_by_turns_gain_what_drafting_throughout_would() -> None:
    """Drafting loses 4 % on stretches of 30 steps, then wins 28 %; 14 % in all."""
    engine = ScoredEngine(
        lambda step: 0.9 if step // 30 % 2 else 0.1, is_telling=True
    ).run(3000)
    assert engine.over_off(600, 3000) > 1.07
    # And left where nothing easy comes any more.
    engine.share_easy = lambda step: 0.05
    engine.run(1500)
    assert engine.share_drafting(3500, 4500) < 0.15
    assert engine.over_off(3500, 4500) > 0.985
