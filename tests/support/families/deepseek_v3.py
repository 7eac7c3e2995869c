"""DeepSeek-V3: multi-head latent attention, experts after a dense layer."""

from tests.support.families import latent_attention
from tests.support.families.family import HIDDEN_SIZE, NUM_HIDDEN_LAYERS, Family
from tests.support.families.numbered_layers import draw_mtp_frame, is_mtp_weight
from tests.support.families.weights import (
    WeightDrawer,
    draw_experts,
    draw_mlp,
    draw_norms,
)

INNER, EXPERT_INNER, NUM_EXPERTS = 96, 32, 8

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    **latent_attention.CONFIG,
    "intermediate_size": INNER,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": EXPERT_INNER,
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


def draw_trunk_layer(weights: WeightDrawer, index: int) -> None:
    """Decoder layer ``index``; the indices after the last are the MTP layers."""
    prefix = f"model.layers.{index}"
    draw_norms(weights, prefix, HIDDEN_SIZE)
    latent_attention.draw_latent_attention(weights, f"{prefix}.self_attn")
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
    draw_trunk_layer(weights, NUM_HIDDEN_LAYERS + index)
    draw_mtp_frame(weights, f"model.layers.{NUM_HIDDEN_LAYERS + index}")


FAMILY = Family(
    name="deepseek_v3",
    config=CONFIG,
    draw_trunk_layer=draw_trunk_layer,
    draw_mtp_layer=draw_mtp_layer,
    is_mtp_weight=is_mtp_weight,
    cpu_attention_backend=latent_attention.CPU_BACKEND,
)
