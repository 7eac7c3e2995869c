"""Model Runner V2: a step whose requests are all greedy, verified in two launches.

vLLM verifies every step as if it were sampled: statistics of each row, a test of each
draft token, a token drawn anew for every request, counts. For greedy requests all of
it comes to the target's likeliest token of each row and a comparison. On a fast GPU
launching the rest takes longer than running it, at K = 0 as well, where vLLM draws
Gumbel noise of weight 0.

What a request asks of its logits beforehand (penalties, biases, allowed tokens) vLLM
does to them. Who needs more of them than the largest goes vLLM's way, and so does the
whole batch: sampling, logprobs, grammars.
"""

from typing import Any

import torch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    gather_draft_sampled,
    get_max_chunk_logits,
)

from vllm_mtp.integration.load.compat import check_attributes
from vllm_mtp.integration.v2.rejection_sampler import MTPPlusRejectionSampler
from vllm_mtp.kernels.dispatch import Backend, choose
from vllm_mtp.records import GreedyStep

RUNNER_ATTRIBUTES = (
    "batch_sharder",
    "pcp_manager",
    "req_states",
    "sample",
    "vocab_size",
)


SAMPLER_ATTRIBUTES = (
    "compute_nans",
    "needs_logits_processing",
    "return_sampling_mask",
    "sampling_states",
    "trace_replay_state",
)
REJECTION_ATTRIBUTES = ("synthetic_conditional_rates",)


class GreedyVerification:
    """Samples greedy steps for a runner."""

    def __init__(self, runner: Any) -> None:
        """Choose and compile the kernels.

        Args:
            runner: vLLM's V2 model runner; its samplers may not exist yet.
        """
        self._runner = runner
        self._num_columns = runner.speculator.num_speculative_steps + 1
        self._max_rows = get_max_chunk_logits(runner.vocab_size)
        self._backend: Backend = choose(runner.device)
        self._applies: bool | None = None
        self._warm_up(runner.device)

    def fits(self, batch: Any) -> bool:
        """Whether a batch needs nothing but the likeliest tokens.

        Args:
            batch: vLLM's ``InputBatch``.
        """
        if self._applies is None:
            self._applies = verifies_tokens_alone(self._runner)
        if not self._applies or not batch.num_reqs:
            return False
        sampler, requests = self._runner.sampler, batch.idx_mapping_np
        return bool(
            not sampler.sampling_states.temperature.np[requests].any()
            and sampler.get_logprobs_dims(requests) is None
            # Else vLLM processes a part at a time.
            and len(batch.logits_indices) <= self._max_rows
        )

    def sample(
        self,
        # [num_tokens, hidden_size]
        hidden_states: torch.Tensor,
        batch: Any,
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        """As the runner's ``sample``, for a batch that fits."""
        rows = batch.logits_indices
        logits = self._runner.model.compute_logits(hidden_states[rows])
        logits = self._processed(logits, batch)
        step = GreedyStep(
            # The first of equals, as vLLM takes it.
            logits.argmax(dim=-1),
            batch.input_ids,
            batch.positions,
            rows,
            batch.cu_num_logits,
            batch.seq_lens,
            batch.idx_mapping,
            self._runner.req_states.prefill_len.gpu,
        )
        num_columns = self._num_columns if batch.num_draft_tokens else 1
        tokens, *counts = self._accept(step, batch.num_reqs, num_columns)
        output = SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=counts[0],
            num_rejected=counts[1],
        )
        return output, counts[0], counts[1]

    def _processed(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        """What the requests' sampling parameters make of ``[num_rows, vocab]``."""
        sampler = self._runner.sampler
        if not sampler.needs_logits_processing[batch.idx_mapping_np].any():
            return logits
        token_ids, positions = gather_draft_sampled(
            batch.input_ids,
            batch.positions,
            batch.logits_indices,
            batch.expanded_idx_mapping,
            batch.expanded_local_pos,
            self._runner.req_states.prefill_len.gpu,
        )
        processed: torch.Tensor = sampler.apply_sampling_params(
            logits,
            batch.expanded_idx_mapping,
            batch.idx_mapping,
            batch.idx_mapping_np,
            positions,
            token_ids,
            batch.expanded_local_pos,
            batch.seq_lens_cpu_upper_bound.numpy(),
        )
        return processed

    def _accept(
        self, step: GreedyStep, num_reqs: int, num_columns: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = step.logits_indices
        tokens = rows.new_empty(num_reqs, num_columns)
        num_sampled = step.cu_num_logits.new_empty(num_reqs)
        num_rejected = torch.empty_like(num_sampled)
        self._backend.accept_greedily(step, tokens, num_sampled, num_rejected)
        return tokens, num_sampled, num_rejected

    def _warm_up(self, device: torch.device) -> None:
        """Compile before requests come, as vLLM does with its kernels."""
        longs = torch.zeros(1, dtype=torch.int64, device=device)
        ints = torch.zeros(2, dtype=torch.int32, device=device)
        starts = torch.arange(2, dtype=torch.int32, device=device)
        step = GreedyStep(longs, ints, longs, longs, starts, ints, longs, ints)
        for num_columns in (1, self._num_columns):
            self._accept(step, 1, num_columns)


def verifies_tokens_alone(runner: Any) -> bool:
    """Whether this engine's greedy requests are verified by their tokens.

    Watermarks, forced tokens, masks to be returned, counts of NaNs, made-up acceptance
    and models with samplers of their own ask for more, batches that are split among
    ranks for another way.
    """
    sampler, rejection = runner.sampler, runner.rejection_sampler
    is_known = type(rejection) in (RejectionSampler, MTPPlusRejectionSampler)
    if type(sampler) is not Sampler or not is_known:
        return False
    check_attributes(sampler, SAMPLER_ATTRIBUTES)
    check_attributes(rejection, REJECTION_ATTRIBUTES)
    return (
        rejection.synthetic_conditional_rates is None
        and sampler.trace_replay_state is None
        and not sampler.compute_nans
        and not sampler.return_sampling_mask
        and runner.batch_sharder is None
        and runner.pcp_manager is None
    )
