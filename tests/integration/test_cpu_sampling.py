"""Sampling on a CPU: the distribution is vLLM's, and what it does not touch is, too."""

import pytest
import torch
from scipy.stats import chisquare

from tests.support.engines import engine, greedy, model_runner
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts

VOCAB_SIZE = 2048
NUM_ROWS = 64
NUM_ROUNDS = 400
SIGNIFICANCE = 1e-4


@pytest.mark.parametrize("top_k", [None, 7])
@pytest.mark.parametrize("top_p", [None, 0.8])
def test_tokens_come_as_often_as_the_target_says(
    top_k: int | None, top_p: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

    from vllm_mtp.integration.v1.cpu_sampling import FEW_LOGITS, DrawsWithOneNumber

    torch.manual_seed(3)
    row = torch.full((VOCAB_SIZE,), float("-inf"))
    row[::64] = 2.0 * torch.randn(VOCAB_SIZE // 64)
    logits = row.repeat(NUM_ROWS, 1)
    assert logits.numel() >= FEW_LOGITS
    k = None if top_k is None else torch.full((NUM_ROWS,), top_k)
    p = None if top_p is None else torch.full((NUM_ROWS,), top_p)
    sampler = DrawsWithOneNumber()
    monkeypatch.delattr(TopKTopPSampler, "forward_cpu")  # vLLM's takes no part
    drawn = [sampler(logits.clone(), {}, k, p)[0] for _ in range(NUM_ROUNDS)]
    counts = torch.bincount(torch.cat(drawn), minlength=VOCAB_SIZE).double()
    wanted = apply_top_k_top_p(logits.clone(), k, p)[0].double().softmax(dim=0)
    assert not counts[wanted == 0].any()
    likely = wanted > 0
    assert 2 < likely.sum() <= (top_k or VOCAB_SIZE)
    expected = NUM_ROUNDS * NUM_ROWS * wanted[likely]
    assert chisquare(counts[likely].numpy(), expected.numpy()).pvalue > SIGNIFICANCE


def test_a_seed_gives_the_token_that_it_gives_without_speculation() -> None:
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    from vllm_mtp.integration.v1.cpu_sampling import DrawsWithOneNumber

    logits = torch.randn(NUM_ROWS, VOCAB_SIZE)
    drawn = []
    for sampler in (TopKTopPSampler(), DrawsWithOneNumber()):
        torch.manual_seed(5)
        seeded = {row: torch.Generator().manual_seed(row) for row in range(NUM_ROWS)}
        drawn.append(sampler(logits.clone(), seeded, None, None)[0])
    assert torch.equal(*drawn)


def test_the_likeliest_token_is_the_one_that_vllm_finds() -> None:
    """Of equal ones, too: with and without speculation the same text."""
    from vllm.platforms import current_platform
    from vllm.v1.sample.sampler import Sampler

    from vllm_mtp.integration.v1.cpu_sampling import sample_fast_on_cpu

    current_platform.import_kernels()
    sampler = Sampler()
    sample_fast_on_cpu(sampler)
    for num_rows in (1, NUM_ROWS):
        logits = torch.randn(num_rows, 16384).clamp(max=2.0)
        logits[0, :100] = float("-inf")
        assert ((logits == 2.0).sum(dim=1) > 1).all()
        theirs = Sampler.greedy_sample(logits)
        assert torch.equal(sampler.greedy_sample(logits), theirs)


def test_an_engine_samples_so_if_it_drafts_and_no_other_does() -> None:
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    from vllm_mtp.integration.v1.cpu_sampling import DrawsWithOneNumber

    used = {}
    for method in ("mtp", "mtp_plus"):
        config = {"method": method, "num_speculative_tokens": 1}
        with engine(BUNDLED_CHECKPOINT, speculative_config=config) as llm:
            sampler = model_runner(llm).sampler
            used[method] = type(sampler.topk_topp_sampler)
            greedy(llm, heldout_prompts(1, max_tokens=16), 4)
    assert used == {"mtp": TopKTopPSampler, "mtp_plus": DrawsWithOneNumber}


@pytest.mark.parametrize("with_k", [True, False])
@pytest.mark.parametrize("top_p", [(1.0, 1.0, 1.0), (0.5, 1.0, 0.9), (0.5, 0.6, 0.9)])
def test_rows_are_cut_as_vllm_cuts_them_all(
    top_p: tuple[float, ...], with_k: bool
) -> None:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    from vllm_mtp.integration.v1.truncation import truncate

    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    k = torch.tensor([7, 50, 20]) if with_k else None
    p = torch.tensor(top_p)
    wanted = apply_top_k_top_p(logits.clone(), k, p)
    assert torch.equal(truncate(logits.clone(), k, p), wanted)
    assert wanted.isinf().any() == (with_k or min(top_p) < 1.0)
