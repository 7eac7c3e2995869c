"""Sampled requests: whether drafts are drawn or chosen, and how they are tested."""

from typing import Any

import torch
from vllm.platforms import current_platform

from vllm_mtp.config import AUTO
from vllm_mtp.drafting.vocabulary import choose_num_rows
from vllm_mtp.drafting.vocabulary_list import listed_token_ids
from vllm_mtp.integration.load.settings import SETTINGS_KEY, settings_of
from vllm_mtp.integration.load.synthetic_acceptance import is_synthetic

DRAWN, CHOSEN, BLOCK = "probabilistic", "greedy", "block"
MAX_PROPOSALS_SHARE = 0.01
"""Of the device's memory, for the proposals that Model Runner V2 keeps."""


def choose_methods(vllm_config: Any) -> None:
    """Decide for Model Runner V2 what ``auto`` means, in the finished config.

    Drafts are tested as `verifies_blocks` says. Whether they are drawn: V2 keeps a row
    of the draft vocabulary for each draft token of each request that could run
    (`v2.proposals`), 0.27 GB for 1024 requests, K = 8 and 16k tokens in bfloat16; drawn
    drafts are worth that where memory is plenty. V1 keeps a row for each draft token of
    a step.
    """
    if not vllm_config.use_v2_model_runner:
        return
    speculation, own = vllm_config.speculative_config, settings_of(vllm_config)
    if verifies_blocks(vllm_config):
        speculation.rejection_sample_method = BLOCK
    if _drafts_its_own_way(speculation):
        return
    draws = own.draft_sample_method == DRAWN or (
        own.draft_sample_method == AUTO
        and not speculation.use_local_argmax_reduction
        and _proposals_bytes(vllm_config) <= MAX_PROPOSALS_SHARE * _device_bytes()
    )
    if keeps_own_proposals(vllm_config):
        # Or vLLM would take memory for rows of the whole vocabulary.
        speculation.draft_sample_method = CHOSEN
    decided = own.model_copy(update={"draft_sample_method": DRAWN if draws else CHOSEN})
    vllm_config.additional_config[SETTINGS_KEY] = decided.model_dump(mode="json")


def draws_drafts(vllm_config: Any) -> bool:
    """Whether this engine draws drafts of sampled requests from the proposal."""
    method = settings_of(vllm_config).draft_sample_method
    speculation = vllm_config.speculative_config
    if _drafts_its_own_way(speculation):
        return bool(speculation.draft_sample_method == DRAWN)
    return bool(
        method == DRAWN or (method == AUTO and not vllm_config.use_v2_model_runner)
    )


def keeps_own_proposals(vllm_config: Any) -> bool:
    """Whether proposals are ours to keep on V2, by draft vocabulary.

    Watermarks are drawn by token id, over the whole vocabulary: there they are vLLM's.
    """
    return vllm_config.watermark_config is None and not _drafts_its_own_way(
        vllm_config.speculative_config
    )


def tests_shadow_drafts(vllm_config: Any) -> bool:
    """Whether drawn drafts that are not verified are tested all the same.

    Where the scheduler gets drafts at all, and where one row of the target for each
    request is sampled from in one place: see `v1.shadow_drafts`.
    """
    return (
        draws_drafts(vllm_config)
        and not vllm_config.use_v2_model_runner
        and not vllm_config.scheduler_config.async_scheduling
        and not is_synthetic(vllm_config)
    )


def verifies_blocks(vllm_config: Any) -> bool:
    """Whether the draft tokens of a sampled request are tested jointly.

    Where that is cheap: V2 has vLLM's kernels for it. Ours for V1 passes over whole
    rows a few times more than vLLM's test and waits for the device twice; on a CPU
    that is nothing beside the target's pass, on a GPU nobody has measured it. Where
    texts are watermarked vLLM refuses every sampled request of such an engine.
    """
    method = settings_of(vllm_config).rejection_sample_method
    if method == AUTO:
        is_cheap = vllm_config.use_v2_model_runner or current_platform.is_cpu()
        return bool(is_cheap and vllm_config.watermark_config is None)
    return bool(method == BLOCK)


def _drafts_its_own_way(speculation: Any) -> bool:
    return bool(speculation.use_gemma4_mtp() or speculation.use_step3p5_mtp())


def _proposals_bytes(vllm_config: Any) -> int:
    own, model = settings_of(vllm_config), vllm_config.model_config
    num_rows: int = (
        vllm_config.scheduler_config.max_num_seqs * vllm_config.num_speculative_tokens
    )
    vocab_size = int(model.get_vocab_size())
    num_ranks = vllm_config.parallel_config.tensor_parallel_size
    num_columns = choose_num_rows(own, listed_token_ids(own), vocab_size, num_ranks)
    itemsize = torch.empty(0, dtype=model.head_dtype).itemsize
    return num_rows * (num_columns or vocab_size) * itemsize


def _device_bytes() -> int:
    return int(current_platform.get_device_total_memory())
