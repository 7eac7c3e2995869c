"""Drafts continued from contexts: how far, and what it is worth to a controller."""

import random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.control.known_times import times_of
from tests.unit.control.small_engine import line_s
from vllm_mtp.acceptance import survival
from vllm_mtp.control.continuing import continued_plan
from vllm_mtp.control.goodput import GoodputController
from vllm_mtp.control.options import GoodputOptions
from vllm_mtp.control.planner import Group, plans
from vllm_mtp.control.step_times import Times
from vllm_mtp.records import (
    DecodeRequest,
    DraftDecision,
    RequestOutcome,
    StepOutcome,
)

K_MAX = 4
CHANCES = st.lists(st.floats(0.05, 0.95), min_size=K_MAX, max_size=K_MAX)
GROUPS = st.lists(
    st.builds(
        lambda n, chain, copies: Group(n, survival(chain), copied=survival(copies)),
        st.integers(1, 3),
        CHANCES,
        st.one_of(st.just([]), CHANCES),
    ),
    min_size=1,
    max_size=2,
)
TIMES = st.builds(
    lambda rows: times_of([1.0, *sorted(rows)]),
    st.lists(st.floats(1.0, 3.0), min_size=K_MAX, max_size=K_MAX),
)


@settings(max_examples=200, deadline=None)
@given(GROUPS, TIMES, st.integers(1, K_MAX - 1))
def test_no_other_number_of_copied_tokens_is_worth_more(
    groups: list[Group], times: Times, depth: int
) -> None:
    plan = plans(groups, times, [0, depth], may_mix=False)[-1]
    found = continued_plan(plan, groups, times)
    num_requests = sum(group.num_requests for group in groups)
    lengths = [found.copy_length(depth, group) for group in groups]
    marginals = sorted(
        (s for g in groups for s in g.continued(depth) for _ in range(g.num_requests)),
        reverse=True,
    )
    before_s = times.seconds(depth, depth)
    worths = [plan.goodput]
    for count in range(1, len(marginals) + 1):
        rows = depth + count / num_requests
        seconds = plan.seconds + times.seconds(rows, depth, len(groups) == 1) - before_s
        worths.append((plan.tokens + sum(marginals[:count])) / seconds)
    # Tokens of a group come together: only whole ones can be left out.
    assert found.goodput >= plan.goodput
    assert found.goodput <= max(worths) + 1e-9
    copied = sum(
        g.num_requests * (k - depth) for g, k in zip(groups, lengths, strict=True)
    )
    assert found.goodput == pytest.approx(worths[copied])


class Run(NamedTuple):
    """Of one request that decodes for a while."""

    tokens_per_s: float
    decisions: list[DraftDecision]


LONGEST = 16


def run(
    chain: float,
    copy: float,
    copies: bool = True,
    offers: float = 1.0,
    is_blind: bool = False,
    seed: int = 1,
    gap: int = 0,
) -> Run:
    """A request whose context offers right tokens with chance ``copy`` each.

    Args:
        chain: Acceptance of the MTP layers' tokens.
        copy: Of copied ones.
        copies: Whether any are.
        offers: How often the context offers any.
        is_blind: Rows are scheduled before it is known whether it does.
        seed: Of what happens.
        gap: Steps of 48 in which the context offers nothing.
    """
    rng = random.Random(seed)
    controller = GoodputController(LONGEST, GoodputOptions(copies=copies, seed=seed))
    decisions, tokens, seconds, offered = [], 0, 0.0, False
    for step in range(600):
        controller.may_draft()
        request = DecodeRequest("a", 100, is_copying=copies and offered)
        decision = controller.decide([request])
        decisions.append(decision)
        length = decision.num_draft_tokens["a"]
        wanted = decision.copy_lengths.get("a", length)
        right = length
        for place in range(length):
            if rng.random() >= chain:
                right = place
                break
        # Where the text goes on as the context does, that agrees with right drafts.
        agrees = right == length or rng.random() < 0.05
        offered = decision.draft_depth > 0 and step % 48 >= gap and agrees
        offered = offered and rng.random() < offers
        if not (offered or is_blind):
            wanted = length
        same = 0
        while right == length and offered and same < LONGEST and rng.random() < copy:
            same += 1
        accepted = right + min(same, wanted - length)
        compared, matched = 0, 0
        if offered and length:
            matched = 1 + same if right == length else 0
            compared = 1 + min(accepted - length + 1, LONGEST - length)
            compared = compared if right == length else 1
        outcomes = [RequestOutcome("a", compared, min(matched, compared))]
        if not offered and (wanted > length if is_blind else request.is_copying):
            outcomes = [RequestOutcome("a", 1, 0)]  # as the scheduler takes it
        if offered and not length:  # a shadow draft
            outcomes = []
        step_s = line_s(float(wanted), decision.draft_depth)
        tokens, seconds = tokens + accepted + 1, seconds + step_s
        controller.observe(
            StepOutcome(
                (RequestOutcome("a", wanted, accepted, num_copied=wanted - length),)
                if wanted
                else (),
                1,
                1 + wanted,
                step_s * rng.lognormvariate(0.0, 0.03),
                decision.draft_depth,
                num_decode_requests=1,
                num_context_tokens=100,
                copies=tuple(outcomes),
            )
        )
    return Run(tokens / seconds, decisions)


def longest_copies(found: Run) -> list[int]:
    return [d.copy_lengths.get("a", 0) for d in found.decisions[300:]]


@pytest.mark.parametrize("chain", [0.5, 0.8])
def test_where_contexts_are_right_drafts_are_long_and_steps_few(chain: float) -> None:
    with_copies, without = run(chain, 0.97), run(chain, 0.97, copies=False)
    longest = [k for k in longest_copies(with_copies) if k]
    assert len(longest) > 60
    assert sum(k >= 8 for k in longest) > 0.7 * len(longest)
    assert with_copies.tokens_per_s > 1.25 * without.tokens_per_s
    assert not any(d.copy_lengths for d in without.decisions)


def test_a_context_that_goes_on_again_is_noticed() -> None:
    speeds = [
        sum(run(0.4, 0.97, copies, seed=seed, gap=24).tokens_per_s for seed in range(6))
        for copies in (True, False)
    ]
    assert speeds[0] > 1.1 * speeds[1]


@pytest.mark.parametrize(("chain", "copy"), [(0.7, 0.1), (0.7, 0.4), (0.3, 0.2)])
@pytest.mark.parametrize(("offers", "is_blind"), [(0.2, False), (0.2, True), (1, True)])
def test_where_they_are_wrong_nothing_is_lost(
    chain: float, copy: float, offers: float, is_blind: bool
) -> None:
    speeds = [
        sum(
            run(chain, copy, copies, offers, is_blind, seed).tokens_per_s
            for seed in seeds
        )
        for copies, seeds in ((True, range(6)), (False, range(10, 16)))
    ]
    assert speeds[0] > 0.97 * speeds[1]


def test_what_the_draft_lengths_are_is_right_for_all_others() -> None:
    """Copied tokens say nothing of the MTP layers."""
    controller = GoodputController(LONGEST, GoodputOptions(copies=True))
    controller.decide([DecodeRequest("a", 100)])
    known = GoodputController(LONGEST, GoodputOptions())
    known.decide([DecodeRequest("a", 100)])
    for _ in range(40):
        controller.survival.observe([RequestOutcome("a", 12, 12, num_copied=10)])
        known.survival.observe([RequestOutcome("a", 2, 2)])
    class_id = known.survival.class_of["a"]
    assert controller.survival.class_of["a"] == class_id
    assert controller.survival.survival_of_class(
        class_id
    ) == known.survival.survival_of_class(class_id)
