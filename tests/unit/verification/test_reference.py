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

from vllm_mtp.verification.reference import (
    AcceptanceTest,
    Verified,
    block_test,
    greedy_test,
    ratio_test,
)

VOCAB_SIZE = 4
Prefix = tuple[int, ...]


class Tree:
    """Target and proposal after every prefix up to a length."""

    def __init__(self, seed: int, depth: int, kind: str) -> None:
        self.depth = depth
        generator = torch.Generator().manual_seed(seed)
        self.target: dict[Prefix, torch.Tensor] = {}
        self.proposal: dict[Prefix, torch.Tensor] = {}
        for length in range(depth + 1):
            for prefix in product(range(VOCAB_SIZE), repeat=length):
                logits = 2.0 * torch.randn(2, VOCAB_SIZE, generator=generator).double()
                target, proposal = logits.softmax(-1)
                if kind == "small vocabulary":
                    proposal[: VOCAB_SIZE // 2] = 0.0
                elif kind == "top-k":
                    target[target.argmin()] = 0.0
                elif kind == "one-hot":
                    proposal = torch.zeros_like(proposal)
                    proposal[logits[1].argmax()] = 1.0
                elif kind == "equal":
                    proposal = target.clone()
                self.target[prefix] = target / target.sum()
                self.proposal[prefix] = proposal / proposal.sum()

    def rows(self, draft: Prefix) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        prefixes = [draft[:i] for i in range(len(draft) + 1)]
        return (
            torch.stack([self.target[p] for p in prefixes]),
            torch.stack([self.proposal[p] for p in prefixes[:-1]]),
            torch.tensor(draft),
        )

    def draft_probability(self, draft: Prefix) -> float:
        chances = [self.proposal[draft[:i]][token] for i, token in enumerate(draft)]
        return float(torch.stack(chances).prod())

    def wanted(self, length: int) -> dict[Prefix, float]:
        """Joint distribution of the first tokens, of the target alone."""
        return {
            tokens: float(
                torch.stack(
                    [self.target[tokens[:i]][t] for i, t in enumerate(tokens)]
                ).prod()
            )
            for tokens in product(range(VOCAB_SIZE), repeat=length)
        }

    def given(self, test: AcceptanceTest, length: int) -> dict[Prefix, float]:
        """The same of what the test lets out; later tokens come from the target."""
        result = dict.fromkeys(product(range(VOCAB_SIZE), repeat=length), 0.0)
        for draft in product(range(VOCAB_SIZE), repeat=self.depth):
            chance = self.draft_probability(draft)
            if not chance:
                continue
            verdict = test(*self.rows(draft))
            for kept, share in enumerate(verdict.num_accepted.tolist()):
                for token, likely in enumerate(verdict.next_token[kept].tolist()):
                    start = (*draft[:kept], token)
                    self._spread(result, start, chance * share * likely)
        return result

    def _spread(
        self, result: dict[Prefix, float], start: Prefix, chance: float
    ) -> None:
        """Add a chance to all outcomes that begin so."""
        (length,) = {len(tokens) for tokens in result}
        if not chance:
            return
        for rest in product(range(VOCAB_SIZE), repeat=max(0, length - len(start))):
            tokens, likely = start, 1.0
            for token in rest:
                likely *= float(self.target[tokens][token])
                tokens = (*tokens, token)
            result[tokens[:length]] += chance * likely


KINDS = ["full", "small vocabulary", "top-k", "one-hot", "equal"]
trees = st.builds(
    Tree, st.integers(0, 2**31), st.integers(1, 3), st.sampled_from(KINDS)
)


def distance(tree: Tree, test: AcceptanceTest, length: int) -> float:
    given, wanted = tree.given(test, length), tree.wanted(length)
    return max(abs(given[tokens] - wanted[tokens]) for tokens in wanted)


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
