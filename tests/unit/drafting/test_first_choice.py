"""Confidence: the largest logit minus the second, and the first choice with it."""

import pytest
import torch

from vllm_mtp.drafting.confidence import confidences_of, take_first_choice


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_columns", [2, 513, 40_000])
def test_first_choice_and_lead_are_those_of_the_two_largest_logits(
    num_columns: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, num_columns, generator=generator).to(dtype)
    largest = logits.double().topk(2, dim=-1)
    kept = logits.clone()
    leads = (largest.values[:, 0] - largest.values[:, 1]).tolist()
    assert confidences_of(logits) == leads
    assert torch.equal(logits, kept), "they are still needed"
    token_ids, confidences = take_first_choice(logits)
    first = kept.gather(-1, token_ids[:, None])[:, 0]
    assert torch.equal(first, kept.amax(dim=-1))
    assert confidences == leads


@pytest.mark.parametrize("num_columns", [9, 40_000])
def test_equal_logits_are_not_sure_at_all(num_columns: int) -> None:
    assert take_first_choice(torch.zeros(2, num_columns))[1] == [0.0, 0.0]
