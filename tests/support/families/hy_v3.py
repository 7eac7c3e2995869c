"""HY-V3: grouped-query attention with q/k norms, experts after a dense layer."""

from tests.support.families.family import HIDDEN_SIZE, NUM_HIDDEN_LAYERS, Family
from tests.support.families.numbered_layers import draw_combined_inputs, is_mtp_weight
from tests.support.families.weights import (
    WeightDrawer,
    draw_experts,
    draw_grouped_query_attention,
    draw_mlp,
    draw_norms,
)

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 32
INNER, EXPERT_INNER, NUM_EXPERTS = 96, 32, 4

CONFIG = {
    "architectures": ["HYV3ForCausalLM"],
    "model_type": "hy_v3",
    "intermediate_size": INNER,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "qk_norm": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "first_k_dense_replace": 1,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": EXPERT_INNER,
    "expert_hidden_dim": EXPERT_INNER,
    "route_norm": True,
    "router_scaling_factor": 1.0,
}


def draw_trunk_layer(weights: WeightDrawer, index: int) -> None:
    """Decoder layer ``index``; the indices after the last are the MTP layers."""
    prefix = f"model.layers.{index}"
    draw_norms(weights, prefix, HIDDEN_SIZE)
    draw_grouped_query_attention(
        weights,
        f"{prefix}.self_attn",
        width=HIDDEN_SIZE,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        qk_norm_mean=1.5,
    )
    if index < CONFIG["first_k_dense_replace"]:
        draw_mlp(weights, f"{prefix}.mlp", HIDDEN_SIZE, INNER)
        return
    draw_experts(
        weights,
        f"{prefix}.mlp",
        width=HIDDEN_SIZE,
        inner=EXPERT_INNER,
        num_experts=NUM_EXPERTS,
        shared="shared_mlp",
    )
    weights.vector(f"{prefix}.mlp.expert_bias", NUM_EXPERTS)


def draw_mtp_layer(weights: WeightDrawer, index: int) -> None:
    """MTP layer ``index``."""
    prefix = f"model.layers.{NUM_HIDDEN_LAYERS + index}"
    draw_trunk_layer(weights, NUM_HIDDEN_LAYERS + index)
    draw_combined_inputs(weights, prefix)
    weights.vector(f"{prefix}.final_layernorm.weight", HIDDEN_SIZE, mean=1.0)


FAMILY = Family(
    name="hy_v3",
    config=CONFIG,
    draw_trunk_layer=draw_trunk_layer,
    draw_mtp_layer=draw_mtp_layer,
    is_mtp_weight=is_mtp_weight,
)
