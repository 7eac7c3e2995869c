"""Where drafts may be continued, or made, by copying from a request's own tokens."""

from typing import Any

from vllm_mtp.integration.extra_heads.registration import has_extra_heads
from vllm_mtp.integration.load.settings import settings_of
from vllm_mtp.integration.load.synthetic_acceptance import is_synthetic
from vllm_mtp.integration.worker.draft_sampling import draws_drafts, keeps_own_proposals

MAX_COPYING = 64
"""Requests of a step up to which contexts are searched. A search reads every token of a
context from the host's memory, and in a larger batch rows are dear."""
LOOK_STEPS = 8
"""Steps after which contexts are searched for long matches, which are a sign that a
request copies: a text that does so goes on for longer."""


def may_copy(vllm_config: Any) -> bool:
    """Whether this engine's drafts may be continued from contexts.

    Not where drafts have one length by agreement of ranks, nor where who fixes K
    compares acceptance by it, nor behind extra heads, nor where acceptance is
    synthetic. On V1 the context is searched on the host, which under async scheduling
    does not know it in time. A trace could not be replayed. Watermarked drafts are
    vLLM's to keep.
    """
    own, speculation = settings_of(vllm_config), vllm_config.speculative_config
    parallel = vllm_config.parallel_config
    is_async = vllm_config.scheduler_config.async_scheduling
    return bool(
        own.copy_from_context
        and own.controller in ("goodput", "random")
        and own.trace_path is None
        and vllm_config.num_speculative_tokens > 1
        and parallel.data_parallel_size == parallel.pipeline_parallel_size == 1
        and parallel.prefill_context_parallel_size == 1
        and not is_synthetic(vllm_config)
        and not speculation.use_gemma4_mtp()
        and not speculation.use_step3p5_mtp()
        and not speculation.use_multi_module_mtp()
        and not has_extra_heads(speculation)
        and (vllm_config.use_v2_model_runner or not is_async)
        and (keeps_own_proposals(vllm_config) or not draws_drafts(vllm_config))
    )


def may_copy_drafts(vllm_config: Any) -> bool:
    """Whether this engine's drafts may be nothing but copies.

    Not where contexts are on the device (V2): whether they offer anything would decide
    about draft steps, which are launched before the host knows. A long match there is a
    sign that it is worth drafting.
    """
    return may_copy(vllm_config) and not vllm_config.use_v2_model_runner
