"""What a V1 model runner tells its sampler of a batch, made by hand."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

_CPU = torch.device("cpu")


def sampling_metadata(num_requests: int, **changes: Any) -> SamplingMetadata:
    """Of greedy requests that ask for nothing else, but for what is changed."""
    config = VllmConfig()
    none = torch.zeros(num_requests)
    processors = SimpleNamespace(
        argmax_invariant=[],
        non_argmax_invariant=[
            MinTokensLogitsProcessor(config, _CPU, False),
            LogitBiasLogitsProcessor(config, _CPU, False),
        ],
    )
    usual: dict[str, Any] = dict.fromkeys(
        ("temperature", "top_p", "top_k", "max_num_logprobs", "prompt_token_ids")
    )
    usual |= {"all_greedy": True, "all_random": False, "generators": {}}
    usual |= {"no_penalties": True, "output_token_ids": [[]] * num_requests}
    usual |= {"allowed_token_ids_mask": None, "bad_words_token_ids": {}}
    for name in ("frequency", "presence", "repetition"):
        usual[f"{name}_penalties"] = none
    return SamplingMetadata(**(usual | {"logitsprocs": processors} | changes))


def draft_metadata(drafts: Sequence[Sequence[int]]) -> SpecDecodeMetadata:
    """Of a verification of these draft tokens of each request."""
    metadata = SpecDecodeMetadata.make_dummy(drafts, _CPU)
    # Those of vLLM's dummy are all zero.
    ends = torch.tensor([len(draft) + 1 for draft in drafts]).cumsum(0) - 1
    rows = torch.arange(int(ends[-1]) + 1)
    metadata.bonus_logits_indices = ends
    metadata.target_logits_indices = rows[~torch.isin(rows, ends)]
    return metadata
