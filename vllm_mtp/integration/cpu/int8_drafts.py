"""Which weights draft: the model's own, or a copy of them in 8 bits."""

from typing import Any

import torch

from vllm_mtp.config import ConfigError
from vllm_mtp.integration.cpu.int8_weights import (
    multiplies_all_rows,
    multiplies_few_rows,
)
from vllm_mtp.integration.load.settings import settings_of


def drafts_in_int8(vllm_config: Any) -> bool:
    """Whether an engine's drafts come from weights in 8 bits."""
    wanted = settings_of(vllm_config).draft_weights
    return wanted != "same" and _can_quantize(vllm_config)


def check_draft_weights(vllm_config: Any) -> None:
    """Refuse what this machine or model cannot do.

    Raises:
        ConfigError: 8 bits are wanted, and not possible.
    """
    wanted = settings_of(vllm_config).draft_weights
    if wanted == "int8" and not _can_quantize(vllm_config):
        raise ConfigError(
            "speculative_config.draft_weights='int8' is not allowed here: it takes an "
            "x86 CPU with AVX2 and without AMX, and a model whose weights are "
            "float32 or bfloat16, not quantized; leave it unset."
        )


def has_kernel() -> bool:
    """Whether this machine gains from weights in 8 bits, as it was tried."""
    return multiplies_all_rows() or multiplies_few_rows()


def _can_quantize(vllm_config: Any) -> bool:
    return (
        has_kernel()
        and not vllm_config.use_v2_model_runner
        and vllm_config.quant_config is None
        and vllm_config.model_config.dtype in (torch.float32, torch.bfloat16)
    )
