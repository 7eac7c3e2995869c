"""DeepSeek-V3: multi-head latent attention, experts after a dense layer."""

from tests.support.families.family import HIDDEN_SIZE, NUM_HIDDEN_LAYERS, Family
from tests.support.families.glm4_moe import draw_mtp_frame, is_mtp_weight
from tests.support.families.weights import (
    ATTENTION_GAIN,
    QK_GAIN,
    WeightDrawer,
    draw_experts,
    draw_mlp,
    draw_norms,
)

NUM_HEADS, Q_RANK, NOPE_DIM, V_DIM = 4, 32, 32, 32
# vLLM's MLA kernels for CPU are compiled for these two sizes only.
KV_RANK, ROPE_DIM = 512, 64
INNER, EXPERT_INNER, NUM_EXPERTS = 96, 32, 8

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "intermediate_size": INNER,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_HEADS,
    "q_lora_rank": Q_RANK,
    "kv_lora_rank": KV_RANK,
    "qk_nope_head_dim": NOPE_DIM,
    "qk_rope_head_dim": ROPE_DIM,
    "v_head_dim": V_DIM,
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
    # YaRN, as published, which vLLM computes in PyTorch. Its CPU kernel for the plain
    # rotary embedding takes the heads of MLA's 3-D query for tokens, so without YaRN
    # decode disagrees with prefill, and speculation with no speculation.
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def _draw_latent_attention(weights: WeightDrawer, prefix: str) -> None:
    weights.matrix(f"{prefix}.q_a_proj.weight", Q_RANK, HIDDEN_SIZE)
    weights.vector(f"{prefix}.q_a_layernorm.weight", Q_RANK, mean=1.0)
    q_rows = NUM_HEADS * (NOPE_DIM + ROPE_DIM)
    weights.matrix(f"{prefix}.q_b_proj.weight", q_rows, Q_RANK, QK_GAIN)
    latent = f"{prefix}.kv_a_proj_with_mqa.weight"
    weights.matrix(latent, KV_RANK + ROPE_DIM, HIDDEN_SIZE)
    weights.vector(f"{prefix}.kv_a_layernorm.weight", KV_RANK, mean=1.0)
    kv_rows = NUM_HEADS * (NOPE_DIM + V_DIM)
    weights.matrix(f"{prefix}.kv_b_proj.weight", kv_rows, KV_RANK)
    columns = NUM_HEADS * V_DIM
    weights.matrix(f"{prefix}.o_proj.weight", HIDDEN_SIZE, columns, ATTENTION_GAIN)


def draw_trunk_layer(weights: WeightDrawer, index: int) -> None:
    """Decoder layer ``index``; the indices after the last are the MTP layers."""
    prefix = f"model.layers.{index}"
    draw_norms(weights, prefix, HIDDEN_SIZE)
    _draw_latent_attention(weights, f"{prefix}.self_attn")
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
    # On a CPU with AMX vLLM picks its AMX kernels whatever the dtype, and they refuse
    # float32.
    cpu_attention_backend="CPU_MLA",
)
