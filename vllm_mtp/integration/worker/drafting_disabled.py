"""When a step goes without the MTP layers, and how many tokens may be pending.

Drafting is *disabled* in a step whose draft depth is 0. The MTP layers then do not run
if every request of the step has one row, with no draft token to verify: their inputs
wait in `PendingTokens` until drafting resumes. Any other step runs them as vLLM does at
depth 0, for these reasons:

- rows of draft tokens: which of them are committed is known on the device only, so
  they cannot be counted here; this happens once, in the step that disables drafting;
- rows of prompts: their KV blocks may be shared with later requests (prefix caching),
  who would find holes in the MTP layers' part. Only *generated* tokens of a request
  that ends while drafting is disabled leave holes (seen when a conversation goes on:
  fewer drafts are accepted, the output is the same).

Shared by the scheduler and both adapters; imports none of them.
"""

from typing import Any

import torch

from vllm_mtp.drafting.pending_tokens import PendingTokens

MAX_PENDING_BYTES = 256 * 2**20
"""Bound on the memory of hidden states of pending tokens, per worker."""


def skips_mtp_layers(
    draft_depth: int, num_requests: int, num_rows: int, num_draft_tokens: int
) -> bool:
    """Whether a step goes without the MTP layers.

    Args:
        draft_depth: Draft steps at the end of the step.
        num_requests: Requests of the step.
        num_rows: Rows of the target's pass.
        num_draft_tokens: Draft tokens that the target verifies.
    """
    return draft_depth == 0 and num_draft_tokens == 0 and num_rows == num_requests


def repeats(scheduler_output: Any, request_ids: list[str]) -> bool:
    """Whether a step is of these requests and no others, one row of each.

    Args:
        scheduler_output: vLLM's, of the step.
        request_ids: All of a step before, in the scheduler's order.
    """
    requests = scheduler_output.scheduled_cached_reqs
    # A new request would have rows.
    return (
        scheduler_output.total_num_scheduled_tokens == len(request_ids)
        and requests.req_ids == request_ids
        and not scheduler_output.scheduled_spec_decode_tokens
        and not requests.resumed_req_ids
    )


def may_disable(vllm_config: Any) -> bool:
    """Whether steps of this engine may go without the MTP layers at all.

    Not where others wait for them: data-parallel ranks run them together, a KV
    connector sends their KV away, context parallelism spreads it over ranks.
    """
    parallel = vllm_config.parallel_config
    return (
        parallel.data_parallel_size == 1
        and parallel.decode_context_parallel_size == 1
        and parallel.prefill_context_parallel_size == 1
        and vllm_config.kv_transfer_config is None
    )


def leaves_pending_tokens(vllm_config: Any) -> bool:
    """Whether steps of this engine without drafts leave tokens for a KV backfill.

    Not where the drafter reads the target's KV (Gemma 4), nor where several MTP layers
    run in turn, which they do in every step.
    """
    speculative = vllm_config.speculative_config
    runs_in_turn = speculative.use_step3p5_mtp() or (
        vllm_config.use_v2_model_runner and speculative.use_multi_module_mtp()
    )
    return (
        may_disable(vllm_config)
        and not runs_in_turn
        and not speculative.use_gemma4_mtp()
    )


def pending_tokens_like(
    # [num_rows, hidden_size]
    hidden_states: torch.Tensor,
    max_num_reqs: int,
) -> PendingTokens:
    """A store for as many rows as the bound allows, at least a few for each request."""
    hidden_size, dtype = hidden_states.shape[1], hidden_states.dtype
    row_bytes = hidden_size * dtype.itemsize + 12
    max_rows = max(MAX_PENDING_BYTES // row_bytes, 4 * max_num_reqs)
    return PendingTokens(max_rows, hidden_size, dtype, hidden_states.device)
