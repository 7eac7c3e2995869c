"""Losses of drafts: what they are, and where their gradients go."""

import itertools
from typing import NamedTuple

import pytest
import torch

from vllm_mtp.tune import losses
from vllm_mtp.tune.losses import KL_DECAY, Head, Step


def probabilities(num_rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator).softmax(-1)


class Distances(NamedTuple):
    kl: torch.Tensor
    acceptance: torch.Tensor
    agreement: torch.Tensor


def distances(target: torch.Tensor, logits: torch.Tensor) -> Distances:
    """As they are defined."""
    draft = logits.softmax(-1)
    kl = (target * (target.log() - draft.log())).sum(-1)
    agreement = (target.argmax(-1) == draft.argmax(-1)).float()
    return Distances(kl, torch.minimum(target, draft).sum(-1), agreement)


def blend(loss: str, found: Distances, mean: torch.Tensor) -> torch.Tensor:
    share = torch.exp(-KL_DECAY * mean) if loss == "lk" else torch.tensor(1.0)
    return share * found.kl + (1 - share) * (1 - found.acceptance)


def of_one_step(
    loss: losses.Loss, target: torch.Tensor, draft: torch.Tensor, mean: float
) -> losses.StepLosses:
    """Of distributions themselves: the head has their logarithms as its rows."""
    num_rows = len(target)
    both = torch.cat([target, draft]).log()
    hidden = torch.eye(2 * num_rows)
    step = Step(hidden[num_rows:], torch.ones(num_rows) / num_rows, torch.tensor(mean))
    return losses.losses(loss, Head(both.t().contiguous()), hidden[:num_rows], [step])


def accepted_by_enumeration(target: list[float], draft: list[float]) -> float:
    """Probability that a drawn draft token passes the ratio test."""
    pairs = zip(target, draft, strict=True)
    return sum(q * min(1.0, p / q) for p, q in pairs)


def test_acceptance_is_that_of_the_ratio_test() -> None:
    target, draft = probabilities(6, 5, 0), probabilities(6, 5, 1)
    kl, acceptance, agreement = (
        of_one_step("lk", target, draft, 0.5).found[0].sum(-1).tolist()
    )
    pairs = zip(target.tolist(), draft.tolist(), strict=True)
    wanted = [accepted_by_enumeration(p, q) for p, q in pairs]
    assert acceptance == pytest.approx(sum(wanted))
    found = torch.nn.functional.kl_div(draft.log(), target, reduction="sum")
    assert kl == pytest.approx(found.item())
    assert agreement == (target.argmax(-1) == draft.argmax(-1)).sum()


def test_lk_is_one_minus_acceptance_where_much_is_accepted_and_kl_where_little() -> (
    None
):
    target, draft = probabilities(6, 5, 0), probabilities(6, 5, 1)
    little, much = (of_one_step("lk", target, draft, mean) for mean in (0.0, 20.0))
    assert little.total.item() == pytest.approx(little.found[0, 0].mean().item())
    assert much.total.item() == pytest.approx(1 - much.found[0, 1].mean().item())


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
    whole, wanted = torch.zeros(()), torch.zeros(2, 3, 9)
    for k in range(2):
        found = distances(target, (hidden[k] @ weight.T)[:, rows])
        whole = whole + (blend(loss, found, means[k]) * weights[k]).sum()
        counts = (weights[k] > 0).float()
        wanted[k] = torch.stack([each * counts for each in found])
    (gradient,) = torch.autograd.grad(whole, hidden)

    monkeypatch.setattr(losses, "CHUNK_NUMBERS", {"cpu": 4 * 11})
    steps = [Step(*each) for each in zip(hidden, weights, means, strict=True)]
    found_losses = losses.losses(loss, head, teacher, steps)
    torch.testing.assert_close(found_losses.total, whole)
    torch.testing.assert_close(found_losses.found, wanted)
    (chunked,) = torch.autograd.grad(found_losses.total * 3, hidden)
    torch.testing.assert_close(chunked, 3 * gradient)


def test_a_smaller_draft_vocabulary_accepts_less() -> None:
    """Tokens outside it are never drafted: what the target gives them is lost."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(8, 6, generator=generator)
    teacher = torch.randn(5, 6, generator=generator)
    step = Step(teacher, torch.ones(5) / 5, torch.tensor(0.5))
    whole = losses.losses("lk", Head(weight), teacher, [step]).found[0, 1].sum()
    assert whole == pytest.approx(5)
    for few in itertools.combinations(range(8), 3):
        head = Head(weight, torch.tensor(few))
        target = head.target(teacher)
        assert (target.sum(-1) < 1).all()
        found = losses.losses("lk", head, teacher, [step]).found[0, 1].sum()
        assert found == pytest.approx(target.sum())
