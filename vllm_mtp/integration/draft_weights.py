"""Which weights draft: the model's own, or a copy of them in 8 bits."""

from typing import Any

import torch
from vllm.platforms import CpuArchEnum, current_platform

from vllm_mtp.config import ConfigError
from vllm_mtp.integration.settings import settings_of


def rounds_drafts(vllm_config: Any) -> bool:
    """Whether an engine's drafts come from weights in 8 bits."""
    wanted = settings_of(vllm_config).draft_weights
    return wanted != "same" and _can_round(vllm_config)


def check_draft_weights(vllm_config: Any) -> None:
    """Refuse what this machine or model cannot do.

    Raises:
        ConfigError: 8 bits are wanted, and not possible.
    """
    wanted = settings_of(vllm_config).draft_weights
    if wanted == "int8" and not _can_round(vllm_config):
        raise ConfigError(
            "speculative_config.draft_weights='int8' is not allowed here: it takes an "
            "x86 CPU with AVX512-VNNI and a model whose weights are float32 or "
            "bfloat16, not quantized; leave it unset."
        )


def _can_round(vllm_config: Any) -> bool:
    if not current_platform.is_cpu() or vllm_config.use_v2_model_runner:
        return False
    if current_platform.get_cpu_architecture() != CpuArchEnum.X86:
        return False
    dtype = vllm_config.model_config.dtype
    # With tiles vLLM takes other kernels, made for bfloat16; never tried in float32.
    has_kernel = dtype == torch.bfloat16 or (
        dtype == torch.float32 and not torch.cpu._is_amx_tile_supported()
    )
    return (
        has_kernel
        and torch.cpu._is_vnni_supported()
        and vllm_config.quant_config is None
    )
