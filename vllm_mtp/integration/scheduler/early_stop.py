"""Where drafting may stop early: `messages` says how the rule travels."""

from typing import Any

from vllm.platforms import current_platform

from vllm_mtp.integration.load.settings import settings_of
from vllm_mtp.integration.load.synthetic_acceptance import is_synthetic


def may_stop_early(vllm_config: Any) -> bool:
    """Whether this engine's drafting may stop early.

    Not where drafts never come back to the scheduler (async scheduling), where a draft
    step is part of a CUDA graph or too short to read its result, where ranks must
    make the same draft steps, or where draft steps differ from each other. Not while a
    trace is written: what was not drafted could not be replayed. Not where acceptance
    is synthetic: it does not depend on the draft.
    """
    own, speculation = settings_of(vllm_config), vllm_config.speculative_config
    return (
        own.early_stop
        and own.controller in ("goodput", "random")
        and own.trace_path is None
        and not is_synthetic(vllm_config)
        and not vllm_config.use_v2_model_runner
        and not vllm_config.scheduler_config.async_scheduling
        and vllm_config.parallel_config.world_size_across_dp == 1
        and (current_platform.is_cpu() or vllm_config.model_config.enforce_eager)
        and not speculation.use_local_argmax_reduction
        and not speculation.use_gemma4_mtp()
        and not speculation.use_step3p5_mtp()
    )
