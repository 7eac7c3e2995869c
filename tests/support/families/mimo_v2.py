"""MiMo-V2: full attention and sliding windows with sinks in turn, a dense MTP layer.

Flash stores q, k and v apart, Pro in one tensor. Published checkpoints have values of
fewer dimensions than keys, for which vLLM has no kernels on a CPU: here they have as
many.
"""

from functools import partial

import torch

from tests.support.families.family import HIDDEN_SIZE, Family
from tests.support.families.numbered_layers import draw_combined_inputs
from tests.support.families.weights import (
    WeightDrawer,
    draw_experts,
    draw_grouped_query_attention,
    draw_mlp,
    draw_norms,
)

NUM_HEADS, NUM_KV_HEADS, NUM_SLIDING_KV_HEADS, HEAD_DIM = 4, 1, 2, 32
INNER, EXPERT_INNER, NUM_EXPERTS = 96, 32, 4

CONFIG = {
    "intermediate_size": INNER,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "v_head_dim": HEAD_DIM,
    "swa_num_attention_heads": NUM_HEADS,
    "swa_num_key_value_heads": NUM_SLIDING_KV_HEADS,
    "swa_head_dim": HEAD_DIM,
    "swa_v_head_dim": HEAD_DIM,
    "hybrid_layer_pattern": [0, 1],
    # Shorter than the texts of the tests.
    "sliding_window": 16,
    "sliding_window_size": 16,
    "add_swa_attention_sink_bias": True,
    "attention_bias": False,
    "attention_value_scale": 1.1,
    "rope_theta": 5000000,
    "swa_rope_theta": 10000,
    "partial_rotary_factor": 0.5,
    "layernorm_epsilon": 1e-6,
    "moe_layer_freq": [0, 1],
    "moe_intermediate_size": EXPERT_INNER,
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}


def _draw_attention(
    weights: WeightDrawer, prefix: str, *, slides: bool, is_fused: bool
) -> None:
    draw_grouped_query_attention(
        weights,
        prefix,
        width=HIDDEN_SIZE,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_SLIDING_KV_HEADS if slides else NUM_KV_HEADS,
        head_dim=HEAD_DIM,
    )
    if slides:
        weights.vector(f"{prefix}.attention_sink_bias", NUM_HEADS)
    if is_fused:
        parts = [weights.tensors.pop(f"{prefix}.{p}_proj.weight") for p in "qkv"]
        weights.tensors[f"{prefix}.qkv_proj.weight"] = torch.cat(parts)


def _draw_trunk_layer(weights: WeightDrawer, index: int, *, is_fused: bool) -> None:
    prefix = f"model.layers.{index}"
    slides = bool(CONFIG["hybrid_layer_pattern"][index])
    draw_norms(weights, prefix, HIDDEN_SIZE)
    _draw_attention(weights, f"{prefix}.self_attn", slides=slides, is_fused=is_fused)
    if not CONFIG["moe_layer_freq"][index]:
        draw_mlp(weights, f"{prefix}.mlp", HIDDEN_SIZE, INNER)
        return
    draw_experts(
        weights,
        f"{prefix}.mlp",
        width=HIDDEN_SIZE,
        inner=EXPERT_INNER,
        num_experts=NUM_EXPERTS,
        shared=None,
    )
    weights.vector(f"{prefix}.mlp.gate.e_score_correction_bias", NUM_EXPERTS)


def _draw_mtp_layer(weights: WeightDrawer, index: int, *, is_fused: bool) -> None:
    prefix = f"model.mtp.layers.{index}"
    draw_combined_inputs(weights, prefix)
    for norm in ("input_layernorm", "pre_mlp_layernorm", "final_layernorm"):
        weights.vector(f"{prefix}.{norm}.weight", HIDDEN_SIZE, mean=1.0)
    _draw_attention(weights, f"{prefix}.self_attn", slides=True, is_fused=is_fused)
    draw_mlp(weights, f"{prefix}.mlp", HIDDEN_SIZE, INNER)


def _family(name: str, architecture: str, model_type: str, *, is_fused: bool) -> Family:
    return Family(
        name=name,
        config={"architectures": [architecture], "model_type": model_type, **CONFIG},
        draw_trunk_layer=partial(_draw_trunk_layer, is_fused=is_fused),
        draw_mtp_layer=partial(_draw_mtp_layer, is_fused=is_fused),
        is_mtp_weight=lambda name: name.startswith("model.mtp."),
        max_mtp_layers=1,
        counts_mtp_layers=False,
    )


FLASH = _family(
    "mimo_v2_flash", "MiMoV2FlashForCausalLM", "mimo_v2_flash", is_fused=False
)
PRO = _family("mimo_v2_pro", "MiMoV2ForCausalLM", "mimo_v2_flash", is_fused=True)
