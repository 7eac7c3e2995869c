"""Model Runner V1: a step without drafts is sampled as if nobody ever drafted.

vLLM takes the path of the rejection sampler whenever speculation is configured; with
nothing to verify that is a detour of half a millisecond on a CPU.
"""

from typing import Any

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.rejection_sampler import RejectionSampler


class PlainSamplingWithoutDrafts(RejectionSampler):
    """vLLM's rejection sampler, left out where there is nothing to reject."""

    def forward(
        self,
        metadata: Any,
        # [num_draft_tokens, vocab_size]
        draft_probs: torch.Tensor | None,
        # [num_draft_tokens + num_reqs, vocab_size]
        logits: torch.Tensor,
        sampling_metadata: Any,
    ) -> SamplerOutput:
        if not any(metadata.num_draft_tokens):
            return self.sampler(logits=logits, sampling_metadata=sampling_metadata)
        return super().forward(metadata, draft_probs, logits, sampling_metadata)
