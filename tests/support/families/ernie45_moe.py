"""Ernie-4.5-MoE: experts after a dense layer; the MTP layer is a dense one."""

from tests.support.families.family import HIDDEN_SIZE, NUM_HIDDEN_LAYERS, Family
from tests.support.families.weights import (
    WeightDrawer,
    draw_combiner,
    draw_experts,
    draw_grouped_query_attention,
    draw_mlp,
    draw_norms,
)

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 32
INNER, EXPERT_INNER, NUM_EXPERTS = 96, 32, 4

CONFIG = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "intermediate_size": INNER,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "use_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "moe_intermediate_size": EXPERT_INNER,
    "moe_num_experts": NUM_EXPERTS,
    "moe_k": 2,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": NUM_HIDDEN_LAYERS - 1,
    "moe_layer_interval": 1,
}


def _draw_attention(weights: WeightDrawer, prefix: str) -> None:
    draw_norms(weights, prefix, HIDDEN_SIZE)
    draw_grouped_query_attention(
        weights,
        f"{prefix}.self_attn",
        width=HIDDEN_SIZE,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
    )


def draw_trunk_layer(weights: WeightDrawer, index: int) -> None:
    """Decoder layer ``index``."""
    prefix = f"model.layers.{index}"
    _draw_attention(weights, prefix)
    if index < CONFIG["moe_layer_start_index"]:
        draw_mlp(weights, f"{prefix}.mlp", HIDDEN_SIZE, INNER)
        return
    draw_experts(
        weights,
        f"{prefix}.mlp",
        width=HIDDEN_SIZE,
        inner=EXPERT_INNER,
        num_experts=NUM_EXPERTS,
    )
    statics = f"{prefix}.mlp.moe_statics.e_score_correction_bias"
    weights.vector(statics, 1, NUM_EXPERTS)


def draw_mtp_layer(weights: WeightDrawer, index: int) -> None:
    """MTP layer ``index``."""
    for norm in ("mtp_emb_norm", "mtp_hidden_norm"):
        weights.vector(f"model.{norm}.{index}.weight", HIDDEN_SIZE, mean=1.0)
    draw_combiner(
        weights,
        f"model.mtp_linear_proj.{index}.weight",
        HIDDEN_SIZE,
        embedding_first=True,
    )
    prefix = f"model.mtp_block.{index}"
    _draw_attention(weights, prefix)
    draw_mlp(weights, f"{prefix}.mlp", HIDDEN_SIZE, INNER)


FAMILY = Family(
    name="ernie45_moe",
    config=CONFIG,
    draw_trunk_layer=draw_trunk_layer,
    draw_mtp_layer=draw_mtp_layer,
    is_mtp_weight=lambda name: name.startswith("model.mtp_"),
    max_mtp_layers=1,
)
