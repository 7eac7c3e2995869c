"""Sampled verification without copies of the logits: as all others, number by number.

The same random numbers decide in the same order, so every token is the same as on the
way that all requests can take, whose distributions ``e2e/exactness`` compares.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from tests.support.sampling_metadata import draft_metadata, sampling_metadata
from vllm_mtp.integration.v1 import cpu_sampling, rejection_sampler
from vllm_mtp.integration.v1.logits_processors import is_plainly_sampled
from vllm_mtp.integration.v1.rejection_sampler import MTPPlusRejectionSampler

VOCAB_SIZE = 40
LENGTHS = [0, 3, 1, 2, 0, 3]
NUM_REQUESTS, NUM_DRAFTS = len(LENGTHS), sum(LENGTHS)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """As an engine's model runner does."""
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


def sampled(**changes: Any) -> SamplingMetadata:
    usual = {
        "all_greedy": False,
        "all_random": True,
        "temperature": torch.tensor([0.3, 0.7, 1.0, 1.0, 1.3, 2.0]),
    }
    return sampling_metadata(NUM_REQUESTS, **(usual | changes))


def forbidden() -> torch.Tensor:
    """Of each request another quarter of the tokens."""
    places = torch.arange(VOCAB_SIZE) + torch.arange(NUM_REQUESTS)[:, None]
    return places % 4 == 0


CHANGES: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top-k": {"top_k": torch.tensor([5, 40, 1, 7, 3, 12])},
    "top-p": {"top_p": torch.tensor([0.9, 1.0, 0.5, 0.8, 0.7, 0.95])},
    "allowed": {"allowed_token_ids_mask": forbidden()},
}


def verify(
    seed: int, sampling: SamplingMetadata, is_drawn: bool, dtype: torch.dtype
) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    shape = (NUM_DRAFTS + NUM_REQUESTS, VOCAB_SIZE)
    logits = 2 * torch.randn(shape, generator=rng)
    probs = torch.randn(NUM_DRAFTS, VOCAB_SIZE, generator=rng).softmax(dim=-1)
    drafts = torch.multinomial(probs, 1, generator=rng)[:, 0]
    if not is_drawn:
        rows = draft_metadata([[0] * k for k in LENGTHS]).target_logits_indices
        drafts = logits[rows].argmax(dim=-1)
    sampler = Sampler()
    cpu_sampling.sample_fast_on_cpu(sampler)
    config = SimpleNamespace(rejection_sample_method="standard")
    ours = MTPPlusRejectionSampler(sampler, config, torch.device("cpu"))
    ours.tests_blocks = True
    metadata = draft_metadata([d.tolist() for d in torch.split(drafts, LENGTHS)])
    torch.manual_seed(seed)
    output = ours.forward(
        metadata, probs if is_drawn else None, logits.to(dtype), sampling
    )
    assert output.logprobs_tensors is None
    return output.sampled_token_ids


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("is_drawn", [True, False], ids=["drawn", "chosen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_random_numbers_give_the_same_tokens(
    name: str, is_drawn: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Or so small a vocabulary would be sampled by vLLM's kernel.
    monkeypatch.setattr(cpu_sampling, "FEW_LOGITS", 0)
    calls, distributions = [], rejection_sampler.distributions
    monkeypatch.setattr(
        rejection_sampler,
        "distributions",
        lambda *args: calls.append(args) or distributions(*args),
    )
    sampling, seeds = sampled(**CHANGES[name]), range(40)
    found = [verify(seed, sampling, is_drawn, dtype) for seed in seeds]
    assert len(calls) == len(seeds), "all went the shorter way"
    monkeypatch.setattr(rejection_sampler, "is_plainly_sampled", lambda given: False)
    wanted = [verify(seed, sampling, is_drawn, dtype) for seed in seeds]
    assert len(calls) == len(seeds), "none did"
    assert all(map(torch.equal, found, wanted))
    assert found[0].dtype == wanted[0].dtype
    kept = torch.stack(found)[:, 1] >= 0
    assert len(set(kept.sum(dim=-1).tolist())) > 2, "some are accepted, some are not"


def test_whatever_changes_more_is_left_to_vllm() -> None:
    assert is_plainly_sampled(sampled())
    for change in (
        {"all_random": False},
        {"generators": {0: torch.Generator()}},
        {"max_num_logprobs": 0},
        {"no_penalties": False},
        {"bad_words_token_ids": {0: [[1]]}},
        {"logprob_token_ids": {0: [1]}},
    ):
        assert not is_plainly_sampled(sampled(**change)), change
    cut = sampled()
    # As much of vLLM's processor as tells that a request has a ``min_p``.
    cut.logitsprocs.argmax_invariant.append(min_p())
    assert not is_plainly_sampled(cut)


def min_p() -> Any:
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor

    processor = MinPLogitsProcessor(VllmConfig(), torch.device("cpu"), False)
    processor.min_p_count = 1
    return processor
