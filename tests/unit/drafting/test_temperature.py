"""The temperature of drawn drafts is learnt from what would have been accepted."""

import pytest
import torch

from vllm_mtp.drafting.temperature import LIMITS, DraftTemperature


def rows(seed: int, sharpness: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Target logits, and those of a proposal that is so much sharper and a bit off."""
    generator = torch.Generator().manual_seed(seed)
    target, error = torch.randn(2, 8, 64, generator=generator)
    return 3 * target, sharpness * (3 * target + 0.5 * error)


def acceptance(factor: float, sharpness: float) -> float:
    """Of proposals that are drawn at a factor."""
    total = 0.0
    for seed in range(100, 120):
        target, proposal = rows(seed, sharpness)
        both = torch.minimum(target.softmax(-1), (proposal / factor).softmax(-1))
        total += float(both.sum(-1).mean())
    return total / 20


@pytest.mark.parametrize("sharpness", [0.6, 1.0, 1.7])
def test_it_finds_what_is_accepted_most(sharpness: float) -> None:
    temperature = DraftTemperature()
    for seed in range(400):
        target, proposal = rows(seed, sharpness)
        drawn = (proposal / temperature.factor).softmax(-1)
        temperature.observe(target.softmax(-1), drawn)
    learnt = acceptance(temperature.factor, sharpness)
    best = max(acceptance(0.4 + 0.05 * i, sharpness) for i in range(40))
    assert learnt > best - 0.01
    if sharpness != 1.0:
        assert learnt > acceptance(1.0, sharpness) + 0.02


def test_it_stays_within_its_limits() -> None:
    temperature = DraftTemperature()
    certain = torch.nn.functional.one_hot(torch.arange(8), 64).float()
    for seed in range(300):
        _, proposal = rows(seed, 0.1)
        drawn = (proposal / temperature.factor).softmax(-1)
        temperature.observe(certain, drawn)
    assert LIMITS[0] <= temperature.factor <= LIMITS[1]


def test_tokens_that_cannot_be_proposed_and_broken_rows_do_no_harm() -> None:
    temperature = DraftTemperature()
    target = torch.full((2, 4), 0.25)
    temperature.observe(target, torch.tensor([[0.5, 0.5, 0.0, 0.0]] * 2))
    assert temperature.factor == pytest.approx(1.0)
    temperature.observe(target, torch.full((2, 4), torch.nan))
    temperature.observe(target[:0], target[:0])
    assert temperature.factor == pytest.approx(1.0)
