"""What some families need, and vLLM does not bring along on a CPU.

LongCat-Flash: kernels of its routing are for GPUs only; here they are in PyTorch.
openPangu: its config class comes with its checkpoints, as remote code.
DeepSeek-V3.2: no sparse attention; the one for Intel's GPUs can at least be built.
"""

from functools import cache
from typing import Any

import torch


@cache
def fill_gaps() -> None:
    """From here on this process can serve all families."""
    from transformers import AutoConfig, PreTrainedConfig
    from vllm.model_executor.layers.fused_moe.router import (
        fused_topk_bias_router,
        zero_expert_router,
    )

    fused_topk_bias_router.vllm_topk_softmax = topk_softmax
    zero_expert_router.zero_experts_compute_triton = zero_experts
    openpangu = "pangu_ultra_moe"
    config = type("OpenPanguConfig", (PreTrainedConfig,), {"model_type": openpangu})
    AutoConfig.register(openpangu, config)
    _build_sparse_attention()


def _build_sparse_attention() -> None:
    from vllm.platforms.cpu import CpuPlatform

    choose = CpuPlatform.get_attn_backend_cls.__func__

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: Any
    ) -> str:
        if attn_selector_config.use_sparse:
            return "vllm.v1.attention.backends.mla.xpu_mla_sparse.XPUMLASparseBackend"
        return choose(cls, selected_backend, attn_selector_config, num_heads)

    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


def topk_softmax(
    # [num_tokens, top_k] each, written in place
    topk_weights: torch.Tensor,
    topk_indices: torch.Tensor,
    token_expert_indices: torch.Tensor,
    # [num_tokens, num_experts]
    gating_output: torch.Tensor,
    renormalize: bool = False,
    # [num_experts]: it decides who is chosen, not how much each counts
    e_score_correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``torch.ops._moe_C.topk_softmax``."""
    assert not renormalize
    assert e_score_correction_bias is not None
    scores = gating_output.float().softmax(dim=-1)
    chosen = (scores + e_score_correction_bias).topk(topk_indices.shape[1]).indices
    topk_indices.copy_(chosen)
    topk_weights.copy_(scores.gather(1, chosen))
    return topk_weights, topk_indices


def zero_experts(
    # [num_tokens, top_k] each
    expert_indices: torch.Tensor,
    expert_scales: torch.Tensor,
    num_experts: int,
    zero_expert_type: str,
    # [num_tokens, hidden_size]
    hidden_states: torch.Tensor,
) -> Any:
    """What the experts from ``num_experts`` on return together: their inputs."""
    assert zero_expert_type == "identity"
    scales = expert_scales.masked_fill(expert_indices < num_experts, 0.0)
    return hidden_states * scales.sum(dim=1, keepdim=True).to(hidden_states.dtype)
