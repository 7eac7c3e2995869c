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
from vllm_mtp.control.copied_drafts import CopiedDrafts
from vllm_mtp.control.goodput import GoodputController
from vllm_mtp.control.options import GoodputOptions
from vllm_mtp.control.planner import Group, plans
from vllm_mtp.control.step_times import Times
from vllm_mtp.control.survival import SurvivalModel
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


@pytest.mark.parametrize("others", [0, 3])
@pytest.mark.parametrize("matched", [0, 2, 4])
@pytest.mark.parametrize("depth", [0, 2])
def test_a_copied_draft_is_as_long_as_is_worth_most(
    depth: int, matched: int, others: int
) -> None:
    drafted = SurvivalModel(K_MAX)
    copied = CopiedDrafts(drafted, may_copy=True)
    outcome = RequestOutcome("a", K_MAX, matched)
    copied.observe([StepOutcome((), 1, 1, 0.1, copied_drafts=(outcome,))] * 40, 99)
    requests = [DecodeRequest("a", 9, is_copying=True)]
    requests += [DecodeRequest(f"b{i}", 9) for i in range(others)]
    number = len(requests)
    chances = drafted.survival_of_class(drafted.see(requests[0]))
    times = times_of([1.0, 1.3, 1.5, 1.6, 2.5])
    (plan,) = plans([Group(number, chances)], times, [depth], may_mix=False)
    length = copied.lengths(plan, times, requests).get("a", 0)

    survival = copied.survival.survival_of_class(copied.survival.class_of["a"])
    alone = [
        sum(survival[:k])
        - plan.goodput
        * times.seconds(depth + (k - depth) / number, depth if others else 0)
        for k in range(1, K_MAX + 1)
    ]
    kept = sum(chances[:depth]) - plan.goodput * times.seconds(depth, depth)
    best = max(alone)
    assert length == (alone.index(best) + 1 if best > kept else 0)
    assert (length > 0) == (matched > 0)


def test_nobody_has_a_copied_draft_who_does_not_copy() -> None:
    requests = [
        DecodeRequest("a", 9),
        DecodeRequest("b", 9, pinned_draft_length=2, is_copying=True),
        DecodeRequest("c", 9, is_copying=True),
    ]
    times, survival = times_of([1.0] * (K_MAX + 1)), SurvivalModel(K_MAX)
    (plan,) = plans([Group(3, [0.1] * K_MAX)], times, [0])
    for may_copy in (True, False):
        copied = CopiedDrafts(survival, may_copy)
        found = copied.lengths(plan, times, requests)
        assert found.keys() == ({"c"} if may_copy else set())


class Run(NamedTuple):
    """Of one request that decodes for a while."""

    tokens_per_s: float
    decisions: list[DraftDecision]


LONGEST = 16
LOOK_STEPS = PATIENCE = 8
LONG_MATCH = 8


class Text:
    """What a context has to do with a text, token by token."""

    def __init__(
        self, chain: float, copy: float, offers: float, gap: int, seed: int
    ) -> None:
        """Begin.

        Args:
            chain: Acceptance of the MTP layers' tokens.
            copy: Of copied ones.
            offers: How often the context offers any.
            gap: Steps of 48 in which it does not.
            seed: Of what happens.
        """
        self._chances, self._offers, self._gap = (chain, copy), offers, gap
        self._rng = random.Random(seed)
        self._num_alike = 0
        """Tokens since the context went on otherwise."""

    def begin_step(self, step: int, length: int) -> tuple[int, int]:
        """Draw what is right from here on: of the draft, and of the context.

        Where the text goes on as the context does the context agrees with right drafts.
        """
        chance, copy = self._chances
        self._offers_any = step % 48 >= self._gap and (
            self._rng.random() < self._offers
        )
        self._agrees_wrongly = self._rng.random() < 0.05
        return self._run(chance, length), self._run(copy, LONGEST)

    def _run(self, chance: float, longest: int) -> int:
        number = 0
        while number < longest and self._rng.random() < chance:
            number += 1
        return number

    def offers(self, length: int, is_right: bool) -> bool:
        """Whether the context does, behind a draft or (length 0) in its place."""
        least = 3 if length else 8
        agrees = is_right or self._agrees_wrongly
        return self._offers_any and agrees and self._num_alike >= least

    def end_step(self, accepted: int, same: int) -> None:
        """Tokens were accepted, and the context would have been right for so many."""
        if accepted < same or not self._offers_any:
            self._num_alike += accepted + 1
        else:
            self._num_alike = 0

    def noise(self) -> float:
        return self._rng.lognormvariate(0.0, 0.03)


def compared(length: int, right: int, same: int, accepted: int) -> RequestOutcome:
    """What became of an offer, as the worker counts it.

    Args:
        length: Of the draft in front of it.
        right: Of its tokens.
        same: Of the offer's tokens.
        accepted: Tokens of the step.
    """
    if right < length:
        return RequestOutcome("a", 1, 0)
    first = int(length > 0)
    examined = first + min(accepted - length + 1, LONGEST - length)
    return RequestOutcome("a", examined, min(first + same, examined))


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
    text = Text(chain, copy, offers, gap, seed)
    options = GoodputOptions(
        copies=copies, copies_drafts=copies and not is_blind, seed=seed
    )
    controller = GoodputController(LONGEST, options)
    decisions, tokens, seconds, patience = [], 0, 0.0, 0
    for step in range(600):
        controller.may_draft()
        request = DecodeRequest("a", 100, is_copying=copies and patience > 0)
        decision = controller.decide([request])
        decisions.append(decision)
        depth, length = decision.draft_depth, decision.num_draft_tokens["a"]
        # Of who has no draft verified it says all the same what a text is like.
        drafted = length or min(depth, 1)
        right, same = text.begin_step(step, drafted)
        alone = text.offers(0, True)
        whole = decision.copied_drafts.get("a", 0) if alone else 0
        if whole:  # and nothing is drafted
            depth, length, drafted, right = 0, 0, 0, 0
        behind = depth > 0 and text.offers(drafted, right == drafted)
        looks = not step % LOOK_STEPS or "a" in decision.copied_drafts
        patience -= patience > 0
        if behind or (alone and looks):
            patience = PATIENCE
        wanted = whole or decision.copy_lengths.get("a", length)
        verified = wanted if is_blind or behind or whole else length
        accepted = min(right, length)
        if (behind or whole) and right == length:
            accepted += min(same, verified - length)
        text.end_step(accepted, same)
        found = [
            [compared(n, right, same, accepted)] if is_there else []
            for n, is_there in ((drafted, behind), (0, alone and looks))
        ]
        is_missed = verified > length if is_blind else request.is_copying
        if is_missed and depth and not behind:
            found[0] = [RequestOutcome("a", 1, 0)]  # as the scheduler takes it
        step_s = line_s(float(verified), depth)
        tokens, seconds = tokens + accepted + 1, seconds + step_s
        num_copied = verified - length
        controller.observe(
            StepOutcome(
                (RequestOutcome("a", verified, accepted, num_copied=num_copied),)
                if verified
                else (),
                1,
                1 + verified,
                step_s * text.noise(),
                depth,
                num_decode_requests=1,
                num_context_tokens=100,
                copies=tuple(found[0]),
                copied_drafts=() if is_blind else tuple(found[1]),
            )
        )
    return Run(tokens / seconds, decisions)


def longest_copies(found: Run) -> list[int]:
    return [
        max(d.copy_lengths.get("a", 0), d.copied_drafts.get("a", 0))
        for d in found.decisions[300:]
    ]


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
