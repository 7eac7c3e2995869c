"""Greedy verification without copies of the logits says what vLLM's own says."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from tests.support.sampling_metadata import draft_metadata, sampling_metadata
from vllm_mtp.integration.v1.logits_processors import is_plainly_greedy
from vllm_mtp.integration.v1.rejection_sampler import MTPPlusRejectionSampler

CPU = torch.device("cpu")
VOCAB_SIZE = 40


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """As an engine's model runner does."""
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


def greedy(num_requests: int, **changes: Any) -> SamplingMetadata:
    return sampling_metadata(num_requests, **changes)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_tokens_are_kept(seed: int, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (5,), generator=rng).tolist()
    lengths[seed % 5] = 3
    num_rows = sum(lengths) + len(lengths)
    # Few values: there are ties.
    logits = torch.randint(0, 9, (num_rows, VOCAB_SIZE), generator=rng).to(dtype)
    drafts, row = [], 0
    for length in lengths:
        likeliest = logits[row : row + length].float().argmax(dim=-1).tolist()
        kept = int(torch.randint(0, 4, (1,), generator=rng))
        drafts.append(likeliest[:kept] + [7] * max(length - kept, 0))
        row += length + 1
    metadata = draft_metadata(drafts)
    sampling = greedy(len(lengths))
    config = SimpleNamespace(rejection_sample_method="standard")
    found, wanted = (
        kind(Sampler(), config, CPU).forward(metadata, None, logits.clone(), sampling)
        for kind in (MTPPlusRejectionSampler, RejectionSampler)
    )
    assert torch.equal(found.sampled_token_ids, wanted.sampled_token_ids)
    assert found.sampled_token_ids.dtype == wanted.sampled_token_ids.dtype
    assert found.logprobs_tensors is None


def test_whatever_changes_a_choice_or_asks_for_more_is_left_to_vllm() -> None:
    assert is_plainly_greedy(greedy(2))
    mask = torch.zeros(2, VOCAB_SIZE, dtype=torch.bool)
    thinking = SimpleNamespace(has_tracked_requests=lambda: True)
    for change in (
        {"all_greedy": False},
        {"max_num_logprobs": 0},
        {"no_penalties": False},
        {"allowed_token_ids_mask": mask},
        {"bad_words_token_ids": {0: [[1]]}},
        {"logprob_token_ids": {0: [1]}},
        {"thinking_budget_state_holder": thinking},
    ):
        assert not is_plainly_greedy(greedy(2, **change)), change
    biased, waiting, unknown = greedy(2), greedy(2), greedy(2)
    biased.logitsprocs.non_argmax_invariant[1].biases = {0: {3: 1.0}}
    waiting.logitsprocs.non_argmax_invariant[0].min_toks = {0: (2, [], {1})}
    unknown.logitsprocs.non_argmax_invariant.append(object())
    for changed in (biased, waiting, unknown):
        assert not is_plainly_greedy(changed)


def test_all_that_a_request_can_ask_for_is_known() -> None:
    """A new field may change what is chosen: see `is_plainly_greedy` then."""
    assert {field.name for field in fields(SamplingMetadata)} == {
        "temperature",
        "all_greedy",
        "all_random",
        "top_p",
        "top_k",
        "generators",
        "max_num_logprobs",
        "no_penalties",
        "prompt_token_ids",
        "frequency_penalties",
        "presence_penalties",
        "repetition_penalties",
        "output_token_ids",
        "allowed_token_ids_mask",
        "bad_words_token_ids",
        "logitsprocs",
        "logprob_token_ids",
        "spec_token_ids",
        "thinking_budget_state_holder",
    }
