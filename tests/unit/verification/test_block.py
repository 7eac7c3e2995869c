"""Block verification of a batch does what the specification says."""

import pytest
import torch

from vllm_mtp.verification.block import REJECTED, sample_block
from vllm_mtp.verification.reference import block_test

VOCAB_SIZE = 6
LENGTHS = [3, 0, 1, 2]
NUM_DRAWS = 40_000


def distributions(seed: int, is_drawn: bool) -> tuple[torch.Tensor, ...]:
    """Target and proposal of each row, draft tokens, and bonus distributions."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(LENGTHS)
    logits = 1.5 * torch.randn(2, num_tokens, VOCAB_SIZE, generator=generator)
    target, proposal = logits.softmax(-1)
    proposal[:, :2] = 0.0  # outside the draft vocabulary
    proposal /= proposal.sum(-1, keepdim=True)
    drafts = proposal.multinomial(1, generator=generator)[:, 0]
    if not is_drawn:
        drafts = proposal.argmax(-1)
        proposal = torch.nn.functional.one_hot(drafts, VOCAB_SIZE).float()
    return target, proposal, drafts


def first_rows() -> torch.Tensor:
    lengths = torch.tensor(LENGTHS)
    return lengths.cumsum(0) - lengths


def draw(
    target: torch.Tensor, proposal: torch.Tensor | None, drafts: torch.Tensor, seed: int
) -> torch.Tensor:
    """``[NUM_DRAWS, num_requests, longest + 1]``: the batch, many times."""
    generator = torch.Generator().manual_seed(seed)
    bonus = torch.arange(100, 100 + len(LENGTHS))
    num_tokens, num_requests = len(drafts), len(LENGTHS)
    rows = torch.arange(NUM_DRAWS)[:, None] * num_tokens + first_rows()
    return sample_block(
        drafts.repeat(NUM_DRAWS),
        rows.flatten(),
        torch.tensor(LENGTHS).repeat(NUM_DRAWS),
        None if proposal is None else proposal.repeat(NUM_DRAWS, 1),
        target.repeat(NUM_DRAWS, 1),
        bonus.repeat(NUM_DRAWS),
        torch.rand(NUM_DRAWS * num_tokens, generator=generator),
        torch.rand(NUM_DRAWS * num_requests, dtype=torch.double, generator=generator),
    ).view(NUM_DRAWS, num_requests, -1)


@pytest.mark.parametrize("is_drawn", [True, False])
def test_outcomes_are_as_likely_as_specified(is_drawn: bool) -> None:
    target, proposal, drafts = distributions(3, is_drawn)
    outputs = draw(target, proposal if is_drawn else None, drafts, seed=5)
    for request, (first, length) in enumerate(
        zip(first_rows().tolist(), LENGTHS, strict=True)
    ):
        rows = slice(first, first + length)
        bonus = torch.zeros(1, VOCAB_SIZE)
        verdict = block_test(
            torch.cat([target[rows], bonus]), proposal[rows], drafts[rows]
        )
        kept = (outputs[:, request] != REJECTED).sum(-1) - 1
        for number, wanted in enumerate(verdict.num_accepted.tolist()):
            chosen = outputs[kept == number, request]
            share = len(chosen) / NUM_DRAWS
            assert share == pytest.approx(wanted, abs=0.012)
            assert torch.equal(
                chosen[:, :number], drafts[rows][:number].expand(len(chosen), -1)
            )
            if number == length:
                assert (chosen[:, number] == 100 + request).all()
            elif len(chosen) > 2000:
                counts = torch.bincount(chosen[:, number], minlength=VOCAB_SIZE)
                difference = counts / len(chosen) - verdict.next_token[number]
                assert difference.abs().max() < 0.04


def test_a_token_that_may_not_be_kept_ends_the_draft() -> None:
    target, proposal, drafts = distributions(3, is_drawn=True)
    drafts = drafts.clone()
    drafts[1] = REJECTED
    outputs = draw(target, proposal, drafts, seed=6)
    assert (outputs[:, 0, 2:] == REJECTED).all()
    assert (outputs[:, 0] >= 0).any(-1).all()


def test_equal_distributions_keep_everything() -> None:
    target, _, _ = distributions(3, is_drawn=True)
    drafts = target.argmax(-1)
    outputs = draw(target, target, drafts, seed=7)
    lengths = (outputs != REJECTED).sum(-1) - 1
    assert (lengths == torch.tensor(LENGTHS)).all()
