"""Multi-head latent attention (MLA), of one size in all families."""

from tests.support.families.family import HIDDEN_SIZE
from tests.support.families.weights import ATTENTION_GAIN, QK_GAIN, WeightDrawer

NUM_HEADS, Q_RANK, NOPE_DIM, V_DIM = 4, 32, 32, 32
# vLLM's MLA kernels for CPU are compiled for these two sizes only.
KV_RANK, ROPE_DIM = 512, 64

CONFIG = {
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_HEADS,
    "q_lora_rank": Q_RANK,
    "kv_lora_rank": KV_RANK,
    "qk_nope_head_dim": NOPE_DIM,
    "qk_rope_head_dim": ROPE_DIM,
    "v_head_dim": V_DIM,
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

CPU_BACKEND = "CPU_MLA"
"""On a CPU with AMX vLLM picks its AMX kernels whatever the dtype, and they refuse
float32."""


def draw_latent_attention(
    weights: WeightDrawer, prefix: str, *, kv_norm_mean: float = 1.0
) -> None:
    """Its projections and norms, as checkpoints store them."""
    weights.matrix(f"{prefix}.q_a_proj.weight", Q_RANK, HIDDEN_SIZE)
    weights.vector(f"{prefix}.q_a_layernorm.weight", Q_RANK, mean=1.0)
    q_rows = NUM_HEADS * (NOPE_DIM + ROPE_DIM)
    weights.matrix(f"{prefix}.q_b_proj.weight", q_rows, Q_RANK, QK_GAIN)
    latent = f"{prefix}.kv_a_proj_with_mqa.weight"
    weights.matrix(latent, KV_RANK + ROPE_DIM, HIDDEN_SIZE)
    weights.vector(f"{prefix}.kv_a_layernorm.weight", KV_RANK, mean=kv_norm_mean)
    kv_rows = NUM_HEADS * (NOPE_DIM + V_DIM)
    weights.matrix(f"{prefix}.kv_b_proj.weight", kv_rows, KV_RANK)
    columns = NUM_HEADS * V_DIM
    weights.matrix(f"{prefix}.o_proj.weight", HIDDEN_SIZE, columns, ATTENTION_GAIN)
