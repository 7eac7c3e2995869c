"""The acceptance tests keep the target's distribution: proved by enumeration.

A tree of target and proposal distributions over a small vocabulary is drawn; all drafts
are enumerated with their probability, and with each all outcomes of the test. The
joint distribution of the first tokens of the output must be the target's, exactly.
"""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.draft_trees import VOCAB_SIZE, Prefix, Tree, distance
from vllm_mtp.verification.reference import (
    AcceptanceTest,
    Verified,
    block_test,
    greedy_test,
    ratio_test,
)

KINDS = ["full", "small vocabulary", "top-k", "one-hot", "equal"]
trees = st.builds(
    Tree, st.integers(0, 2**31), st.integers(1, 3), st.sampled_from(KINDS)
)


@pytest.mark.parametrize("test", [ratio_test, block_test])
@settings(max_examples=40, deadline=None)
@given(tree=trees)
def test_the_output_is_the_targets(test: AcceptanceTest, tree: Tree) -> None:
    assert distance(tree, test, tree.depth) < 1e-9


@settings(max_examples=40, deadline=None)
@given(tree=trees)
def test_the_greedy_output_is_the_targets(tree: Tree) -> None:
    best: Prefix = ()
    for _ in range(tree.depth):
        best = (*best, int(tree.target[best].argmax()))
    given = tree.given(greedy_test, 1)
    assert given[best[:1]] == pytest.approx(1.0)
    for draft in product(range(VOCAB_SIZE), repeat=tree.depth):
        verdict = greedy_test(*tree.rows(draft))
        kept = int(verdict.num_accepted.argmax())
        assert draft[:kept] == best[:kept]


def mean_accepted(tree: Tree, test: AcceptanceTest) -> float:
    total = 0.0
    for draft in product(range(VOCAB_SIZE), repeat=tree.depth):
        chance = tree.draft_probability(draft)
        if chance:
            shares = test(*tree.rows(draft)).num_accepted
            total += chance * float((shares * torch.arange(len(shares))).sum())
    return total


@settings(max_examples=60, deadline=None)
@given(tree=trees)
def test_the_block_test_keeps_at_least_as_much(tree: Tree) -> None:
    assert mean_accepted(tree, block_test) >= mean_accepted(tree, ratio_test) - 1e-9


def test_and_more_where_there_is_more_to_keep() -> None:
    tree = Tree(1, 3, "full")
    assert mean_accepted(tree, block_test) > 1.01 * mean_accepted(tree, ratio_test)


def stops_after_likely_tokens(tree: Tree, test: AcceptanceTest) -> AcceptanceTest:
    """A draft that ends by what is proposed next, given what was drawn before."""

    def shortened(
        target: torch.Tensor, proposal: torch.Tensor, draft: torch.Tensor
    ) -> Verified:
        length = len(draft)
        for i in range(1, len(draft)):
            if proposal[i].max() < 0.5:
                length = i
                break
        verdict = test(target[: length + 1], proposal[:length], draft[:length])
        padding = len(draft) - length
        return Verified(
            torch.cat([verdict.num_accepted, target.new_zeros(padding)]),
            torch.cat([verdict.next_token, target[length + 1 :]]),
        )

    return shortened


@pytest.mark.parametrize("test", [ratio_test, block_test])
def test_a_draft_may_end_by_its_proposals(test: AcceptanceTest) -> None:
    """As early stop does: by distributions and earlier tokens alone."""
    for seed in range(10):
        tree = Tree(seed, 3, "full")
        shortened = stops_after_likely_tokens(tree, test)
        assert distance(tree, shortened, 3) < 1e-9


def renormalise_not(target: torch.Tensor, *rest: torch.Tensor) -> Verified:
    verdict = ratio_test(target, *rest)
    return verdict._replace(next_token=torch.cat([target[:-1], target[-1:]]))


def accept_inverted(
    target: torch.Tensor, proposal: torch.Tensor, draft: torch.Tensor
) -> Verified:
    right = ratio_test(target, proposal, draft)
    swapped = ratio_test(torch.cat([proposal, target[-1:]]), target[:-1] + 1e-9, draft)
    return right._replace(num_accepted=swapped.num_accepted)


@pytest.mark.parametrize("broken", [renormalise_not, accept_inverted])
def test_the_enumeration_notices_a_broken_test(broken: AcceptanceTest) -> None:
    assert distance(Tree(1, 2, "full"), broken, 2) > 1e-3
