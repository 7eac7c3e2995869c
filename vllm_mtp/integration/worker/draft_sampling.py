"""Sampled requests: whether drafts are drawn or chosen, and how they are tested."""

from typing import Any

import torch
from vllm.platforms import current_platform

from vllm_mtp.config import AUTO
from vllm_mtp.integration.load.settings import settings_of

DRAWN, BLOCK = "probabilistic", "block"
MAX_CACHE_SHARE = 0.01
"""Of the device's memory, for the draft distributions that Model Runner V2 keeps."""


def choose_methods(vllm_config: Any) -> None:
    """Decide for Model Runner V2 what ``auto`` means, in the finished config.

    Drafts are tested as `verifies_blocks` says. Whether they are drawn: V2 keeps a row
    of the whole vocabulary for each draft token of each request that could run, 0.6 GB
    for 256 requests, K = 8 and 152k tokens in bfloat16; drawn drafts are worth that
    where memory is plenty. V1 keeps a row of the draft vocabulary for each draft token
    of a step, and reads `draws_drafts`.
    """
    speculation = vllm_config.speculative_config
    if vllm_config.use_v2_model_runner and verifies_blocks(vllm_config):
        speculation.rejection_sample_method = BLOCK
    if (
        settings_of(vllm_config).draft_sample_method == AUTO
        and vllm_config.use_v2_model_runner
        and not _drafts_its_own_way(speculation)
        and not speculation.use_local_argmax_reduction
        and _cache_bytes(vllm_config) <= MAX_CACHE_SHARE * _device_bytes()
    ):
        speculation.draft_sample_method = DRAWN


def draws_drafts(vllm_config: Any) -> bool:
    """Whether this engine draws drafts of sampled requests from the proposal."""
    method = settings_of(vllm_config).draft_sample_method
    speculation = vllm_config.speculative_config
    if method == AUTO and not vllm_config.use_v2_model_runner:
        return not _drafts_its_own_way(speculation)
    return bool(speculation.draft_sample_method == DRAWN)


def tests_shadow_drafts(vllm_config: Any) -> bool:
    """Whether drawn drafts that are not verified are tested all the same.

    Where the scheduler gets drafts at all, and where one row of the target for each
    request is sampled from in one place: see `v1.shadow_drafts`.
    """
    return (
        draws_drafts(vllm_config)
        and not vllm_config.use_v2_model_runner
        and not vllm_config.scheduler_config.async_scheduling
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


def _cache_bytes(vllm_config: Any) -> int:
    model = vllm_config.model_config
    num_rows: int = (
        vllm_config.scheduler_config.max_num_seqs * vllm_config.num_speculative_tokens
    )
    itemsize = torch.empty(0, dtype=model.head_dtype).itemsize
    return num_rows * int(model.get_vocab_size()) * itemsize


def _device_bytes() -> int:
    return int(current_platform.get_device_total_memory())
