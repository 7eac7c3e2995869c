"""Model Runner V1 on a CPU: sampling of steps without drafts, and of bonus tokens.

Here is won back what scheduling takes us beyond no speculation, and more: vLLM's kernel
for sampled requests makes noise for every token of the vocabulary. For 16 requests and
16,384 tokens it takes 4.2 ms of a step of 90 on an EPYC with AVX2 alone, ours 1.2; the
likeliest tokens of 131,072 take 1.3 and 0.4. Requests with a seed keep vLLM's sampling:
the same seed gives the same text as without speculation as long as nothing is drafted.
"""

from typing import Any

import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from vllm_mtp.integration.load.compat import check_attributes
from vllm_mtp.integration.v1.truncation import truncate
from vllm_mtp.verification.drawing import draw
from vllm_mtp.verification.likeliest import likeliest_tokens

FEW_LOGITS = 1 << 16
"""Below, vLLM's single kernels are as fast as several operations: of sampling."""
_FEW_GREEDY_LOGITS = 1 << 20
"""The same of the likeliest token."""


class DrawsWithOneNumber(TopKTopPSampler):
    """vLLM's sampling after temperature, with one random number for each request."""

    def forward_cpu(
        self,
        # [num_reqs, vocab_size] float32, changed in place
        logits: torch.Tensor,
        # seeded requests, by their row
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[num_reqs]`` int64, and logits if vLLM is to return processed ones."""
        is_special = (
            self.use_fp64_gumbel or self.logprobs_mode in PROCESSED_LOGPROBS_MODES
        )
        if generators or is_special or logits.numel() < FEW_LOGITS:
            theirs: tuple[torch.Tensor, torch.Tensor | None]
            theirs = super().forward_cpu(logits, generators, k, p)
            return theirs
        logits = truncate(logits, k, p)
        weights = logits.softmax(dim=-1, dtype=torch.float32)
        return draw(weights, torch.rand(len(weights), dtype=torch.float64)), None


def sample_fast_on_cpu(sampler: Any) -> None:
    """Replace what is slow in vLLM's sampler, where it is vLLM's own for CPUs.

    Args:
        sampler: ``vllm.v1.sample.sampler.Sampler`` of a model runner.
    """
    check_attributes(sampler, ("topk_topp_sampler",))
    theirs = sampler.topk_topp_sampler
    if getattr(theirs.forward, "__func__", None) is not TopKTopPSampler.forward_cpu:
        return
    sampler.topk_topp_sampler = DrawsWithOneNumber(
        theirs.logprobs_mode, theirs.use_fp64_gumbel
    )
    sampler.greedy_sample = _likeliest_tokens


def _likeliest_tokens(
    # [num_reqs, vocab_size] float32
    logits: torch.Tensor,
) -> torch.Tensor:
    """``[num_reqs]`` int64, like vLLM's ``greedy_sample``."""
    if logits.numel() < _FEW_GREEDY_LOGITS:
        theirs: torch.Tensor = Sampler.greedy_sample(logits)
        return theirs
    return likeliest_tokens(logits)
