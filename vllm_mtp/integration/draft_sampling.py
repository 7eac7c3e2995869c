"""Whether drafts of sampled requests are drawn, or chosen like those of greedy ones."""

from typing import Any

from vllm_mtp.integration.settings import settings_of


def draws_drafts(vllm_config: Any) -> bool:
    """Whether this engine draws drafts of sampled requests from the proposal.

    By itself where the proposal is kept cheaply: on Model Runner V1 a row of the draft
    vocabulary for each draft token of a step. Model Runner V2 keeps rows of the whole
    vocabulary for every request that it could serve: gigabytes, so there it is the
    user's choice, as for models whose MTP layers draft in a way of their own.
    """
    method = settings_of(vllm_config).draft_sample_method
    speculation = vllm_config.speculative_config
    if method == "auto":
        return not (
            vllm_config.use_v2_model_runner
            or speculation.use_gemma4_mtp()
            or speculation.use_step3p5_mtp()
        )
    return method == "probabilistic"
