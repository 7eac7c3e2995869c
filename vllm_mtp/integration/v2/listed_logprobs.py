"""Model Runner V2: ``logprob_token_ids`` in steps that verify draft tokens.

A workaround for vLLM 0.32 and 0.33. ``RejectionSampler`` reads the number of
``logprobs`` alone: a request that lists token ids gets the likeliest tokens instead,
or no logprobs at all, in every step in which any request of the batch has draft
tokens. ``Sampler``, which samples the other steps, does what is asked. For upstream:
``docs/upstream/logprob-token-ids.md``.
"""

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler


class ScoresListedTokens(RejectionSampler):
    """vLLM's rejection sampler, which also scores the tokens that requests list."""

    _batch: Any = None
    """vLLM's ``InputBatch`` of the step that is verified."""
    _num_scored_rows = 0
    """Of its rows; vLLM verifies a batch in chunks, in order."""

    def _verify_in_chunks(
        self, logits: torch.Tensor, input_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._batch, self._num_scored_rows = input_batch, 0
        try:
            return super()._verify_in_chunks(logits, input_batch, *args, **kwargs)
        finally:
            self._batch = None

    def _get_logprobs_tensors(
        self,
        # [num_reqs, K_max + 1]
        sampled: torch.Tensor,
        # [num_reqs]
        num_sampled: torch.Tensor,
        # [num_rows, vocab_size]
        logits: torch.Tensor,
        # [num_reqs + 1]
        cu_num_logits: torch.Tensor,
        cu_num_logits_np: np.ndarray,
        max_num_logprobs: int,
    ) -> LogprobsTensors | None:
        first = self._num_scored_rows
        self._num_scored_rows += len(logits)
        state = self.sampler.logprob_token_ids_state
        num_listed = state.max_num_token_ids(self._batch.idx_mapping_np)
        arguments = sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np
        if not num_listed:
            return super()._get_logprobs_tensors(*arguments, max_num_logprobs)
        of_sampled = super()._get_logprobs_tensors(*arguments, 0)
        assert of_sampled is not None
        boundaries = of_sampled.cu_num_generated_tokens
        if boundaries is None:
            # Where draft tokens are left out the device alone knows them.
            boundaries = of_sampled.cu_num_generated_tokens_tensor
        return compute_topk_scores(
            logits,
            max(max_num_logprobs, 0),
            of_sampled.logprob_token_ids[:, 0].contiguous(),
            boundaries,
            logprob_token_ids_state=state,
            expanded_idx_mapping=self._batch.expanded_idx_mapping[
                first : self._num_scored_rows
            ],
            max_per_req_token_ids=num_listed,
            logits_mode=self.sampler.logprobs_mode.endswith("logits"),
        )


def leave_lists_out(sampler: Any) -> None:
    """Ranks that sample a part of the batch each leave the lists out of what they
    gather, for the same reason: mend it.

    Args:
        sampler: vLLM's V2 ``Sampler``.
    """
    dims_of = sampler.get_logprobs_dims
    sampler.get_logprobs_dims = lambda requests, include_token_ids=True: dims_of(
        requests
    )
