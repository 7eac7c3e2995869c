"""GLM-4-MoE: grouped-query attention with q/k norms, experts after a dense layer."""

from tests.support.families.family import (
    HIDDEN_SIZE,
    NUM_HIDDEN_LAYERS,
    Family,
)
from tests.support.families.numbered_layers import draw_mtp_frame, is_mtp_weight
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
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "intermediate_size": INNER,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "attention_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": EXPERT_INNER,
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
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
        bias=True,
        qk_norm_mean=1.0,
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
    )
    weights.vector(f"{prefix}.mlp.gate.e_score_correction_bias", NUM_EXPERTS)


def draw_mtp_layer(weights: WeightDrawer, index: int) -> None:
    """MTP layer ``index``."""
    prefix = f"model.layers.{NUM_HIDDEN_LAYERS + index}"
    draw_trunk_layer(weights, NUM_HIDDEN_LAYERS + index)
    draw_mtp_frame(weights, prefix)


FAMILY = Family(
    name="glm4_moe",
    config=CONFIG,
    draw_trunk_layer=draw_trunk_layer,
    draw_mtp_layer=draw_mtp_layer,
    is_mtp_weight=is_mtp_weight,
)
