"""Losses of drafts: what they are, and where their gradients go."""

import itertools

import pytest
import torch

from vllm_mtp.tune import losses
from vllm_mtp.tune.losses import Head, Step, blend, distances


def probabilities(num_rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator).softmax(-1)


def accepted_by_enumeration(target: list[float], draft: list[float]) -> float:
    """Probability that a drawn draft token passes the ratio test."""
    pairs = zip(target, draft, strict=True)
    return sum(q * min(1.0, p / q) for p, q in pairs)


def test_acceptance_is_that_of_the_ratio_test() -> None:
    target, draft = probabilities(6, 5, 0), probabilities(6, 5, 1)
    found = distances(target, draft.log())
    wanted = [
        accepted_by_enumeration(p, q)
        for p, q in zip(target.tolist(), draft.tolist(), strict=True)
    ]
    assert found.acceptance.tolist() == pytest.approx(wanted)
    kl = torch.nn.functional.kl_div(draft.log(), target, reduction="none").sum(-1)
    torch.testing.assert_close(found.kl, kl)
    same = target.argmax(-1) == draft.argmax(-1)
    assert found.agreement.tolist() == same.float().tolist()


def test_lk_is_one_minus_acceptance_where_much_is_accepted() -> None:
    target, draft = probabilities(6, 5, 0), probabilities(6, 5, 1)
    found = distances(target, draft.log())
    little = blend("lk", found, torch.tensor(0.0))
    torch.testing.assert_close(little, found.kl)
    much = blend("lk", found, torch.tensor(20.0))
    torch.testing.assert_close(much, 1 - found.acceptance)


@pytest.mark.parametrize("loss", ["lk", "kl"])
@pytest.mark.parametrize("drafted", [None, torch.tensor([0, 3, 4, 7, 9])])
def test_chunks_have_the_gradients_of_the_whole(
    loss: losses.Loss, drafted: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(11, 6, generator=generator)
    teacher = torch.randn(9, 6, generator=generator)
    hidden = torch.randn(2, 9, 6, generator=generator, requires_grad=True)
    weights = torch.rand(2, 9, generator=generator)
    weights[:, 4] = 0  # padding
    means = torch.tensor([0.3, 0.6])
    head = Head(weight, drafted)
    rows = torch.arange(11) if drafted is None else drafted
    target = (teacher @ weight.T).softmax(-1)[:, rows]
    whole, wanted = torch.zeros(()), torch.zeros(2, 3)
    for k in range(2):
        found = distances(target, (hidden[k] @ weight.T)[:, rows])
        whole = whole + (blend(loss, found, means[k]) * weights[k]).sum()
        counts = (weights[k] > 0).float()
        wanted[k] = torch.stack([(each * counts).sum() for each in found])
    (gradient,) = torch.autograd.grad(whole, hidden)

    monkeypatch.setattr(losses, "CHUNK_ROWS", 4)
    steps = [Step(*each) for each in zip(hidden, weights, means, strict=True)]
    found_losses = losses.losses(loss, head, teacher, steps)
    torch.testing.assert_close(found_losses.total, whole)
    torch.testing.assert_close(found_losses.sums, wanted)
    (chunked,) = torch.autograd.grad(found_losses.total * 3, hidden)
    torch.testing.assert_close(chunked, 3 * gradient)


def test_a_smaller_draft_vocabulary_accepts_less() -> None:
    """Tokens outside it are never drafted: what the target gives them is lost."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(8, 6, generator=generator)
    teacher = torch.randn(5, 6, generator=generator)
    for few in itertools.combinations(range(8), 3):
        head = Head(weight, torch.tensor(few))
        target = head.target(teacher)
        assert (target.sum(-1) < 1).all()
        found = distances(target, head.draft_logits(teacher))
        assert (found.acceptance <= target.sum(-1) + 1e-6).all()
