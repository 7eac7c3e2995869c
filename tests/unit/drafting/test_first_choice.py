"""Confidence: the largest logit minus the second, and the first choice with it."""

import pytest
import torch

from vllm_mtp.drafting.confidence import confidences_of, take_first_choice


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_choice_and_lead_are_those_of_the_two_largest_logits(
    dtype: torch.dtype,
) -> None:
    logits = torch.randn(7, 513, generator=torch.Generator().manual_seed(0)).to(dtype)
    largest = logits.float().topk(2, dim=-1)
    kept = logits.clone()
    assert torch.equal(
        confidences_of(logits), largest.values[:, 0] - largest.values[:, 1]
    )
    assert torch.equal(logits, kept), "they are still needed"
    token_ids, confidences = take_first_choice(logits)
    assert torch.equal(token_ids, kept.argmax(dim=-1))
    assert torch.equal(confidences, confidences_of(kept))


def test_equal_logits_are_not_sure_at_all() -> None:
    assert take_first_choice(torch.zeros(2, 9))[1].tolist() == [0.0, 0.0]
