"""EXAONE-MoE: sliding windows, full attention without positions, a dense MTP layer."""

from tests.support.families.family import HIDDEN_SIZE, Family
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
    "architectures": ["ExaoneMoEForCausalLM"],
    "model_type": "exaone_moe",
    "intermediate_size": INNER,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "layer_types": ["sliding_attention", "full_attention"],
    # Shorter than the texts of the tests.
    "sliding_window": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "mlp_layer_types": ["dense", "sparse"],
    "first_k_dense_replace": 1,
    "moe_intermediate_size": EXPERT_INNER,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
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
        qk_norm_mean=1.5,
    )


def draw_trunk_layer(weights: WeightDrawer, index: int) -> None:
    """Decoder layer ``index``."""
    prefix = f"model.layers.{index}"
    _draw_attention(weights, prefix)
    if CONFIG["mlp_layer_types"][index] == "dense":
        draw_mlp(weights, f"{prefix}.mlp", HIDDEN_SIZE, INNER)
        return
    draw_experts(
        weights,
        f"{prefix}.mlp",
        width=HIDDEN_SIZE,
        inner=EXPERT_INNER,
        num_experts=NUM_EXPERTS,
    )
    weights.vector(f"{prefix}.mlp.e_score_correction_bias", NUM_EXPERTS)


def draw_mtp_layer(weights: WeightDrawer, index: int) -> None:
    """MTP layer ``index``; what is around it all of them share."""
    for norm in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        weights.vector(f"mtp.{norm}.weight", HIDDEN_SIZE, mean=1.0)
    draw_combiner(weights, "mtp.fc.weight", HIDDEN_SIZE, embedding_first=True)
    _draw_attention(weights, f"mtp.layers.{index}")
    draw_mlp(weights, f"mtp.layers.{index}.mlp", HIDDEN_SIZE, INNER)


FAMILY = Family(
    name="exaone_moe",
    config=CONFIG,
    draw_trunk_layer=draw_trunk_layer,
    draw_mtp_layer=draw_mtp_layer,
    is_mtp_weight=lambda name: name.startswith("mtp."),
)
