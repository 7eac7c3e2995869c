"""Qwen3-Next: gated delta rule and attention in turns, experts after both."""

from tests.support.families.family import HIDDEN_SIZE, Family
from tests.support.families.weights import (
    ATTENTION_GAIN,
    QK_GAIN,
    WeightDrawer,
    draw_combiner,
    draw_experts,
    draw_grouped_query_attention,
    draw_norms,
)

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 32
INNER, NUM_EXPERTS = 32, 4
NUM_K_HEADS, NUM_V_HEADS, STATE_DIM, CONV_WIDTH = 1, 2, 32, 4
KEY_DIM, VALUE_DIM = NUM_K_HEADS * STATE_DIM, NUM_V_HEADS * STATE_DIM

LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": NUM_K_HEADS,
    "linear_num_value_heads": NUM_V_HEADS,
    "linear_key_head_dim": STATE_DIM,
    "linear_value_head_dim": STATE_DIM,
    "linear_conv_kernel_dim": CONV_WIDTH,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}

CONFIG = LINEAR_ATTENTION | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "intermediate_size": 96,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": INNER,
    "shared_expert_intermediate_size": INNER,
    "norm_topk_prob": True,
}


def draw_delta_rule(weights: WeightDrawer, prefix: str) -> None:
    """All of a linear attention layer but its input projections."""
    channels = 2 * KEY_DIM + VALUE_DIM
    weights.convolution(f"{prefix}.conv1d.weight", channels, CONV_WIDTH)
    # A state halves within about four tokens: then rows of rejected drafts that stay
    # in it change what follows.
    weights.vector(f"{prefix}.A_log", NUM_V_HEADS, mean=-1.5)
    weights.vector(f"{prefix}.dt_bias", NUM_V_HEADS)
    weights.vector(f"{prefix}.norm.weight", STATE_DIM, mean=1.0)
    # The output is gated, which takes about half of its size.
    gain = 1.5 * ATTENTION_GAIN
    weights.matrix(f"{prefix}.out_proj.weight", HIDDEN_SIZE, VALUE_DIM, gain)


def draw_gated_attention(weights: WeightDrawer, prefix: str) -> None:
    """Attention with q/k norms and a gate on its output."""
    draw_grouped_query_attention(
        weights,
        prefix,
        width=HIDDEN_SIZE,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        bias=False,
    )
    q_rows = NUM_HEADS * HEAD_DIM
    weights.matrix(f"{prefix}.q_proj.weight", 2 * q_rows, HIDDEN_SIZE, QK_GAIN)
    weights.matrix(f"{prefix}.o_proj.weight", HIDDEN_SIZE, q_rows, 2 * ATTENTION_GAIN)
    for norm in ("q_norm", "k_norm"):
        weights.vector(f"{prefix}.{norm}.weight", HEAD_DIM)


def draw_mtp_frame(weights: WeightDrawer) -> None:
    """What Qwen puts around the decoder layers of its MTP module."""
    draw_combiner(weights, "mtp.fc.weight", HIDDEN_SIZE, embedding_first=True)
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        weights.vector(f"mtp.{norm}.weight", HIDDEN_SIZE)


def is_mtp_weight(name: str) -> bool:
    """Whether ``name`` belongs to the MTP module."""
    return name.startswith("mtp.")


def _draw_mlp(weights: WeightDrawer, prefix: str) -> None:
    draw_experts(
        weights,
        prefix,
        width=HIDDEN_SIZE,
        inner=INNER,
        num_experts=NUM_EXPERTS,
        shared="shared_expert",
    )
    weights.matrix(f"{prefix}.shared_expert_gate.weight", 1, HIDDEN_SIZE)


def draw_trunk_layer(weights: WeightDrawer, index: int) -> None:
    """Decoder layer ``index``."""
    prefix = f"model.layers.{index}"
    draw_norms(weights, prefix, HIDDEN_SIZE, mean=0.0)
    if CONFIG["layer_types"][index] == "linear_attention":
        linear = f"{prefix}.linear_attn"
        rows = 2 * KEY_DIM + 2 * VALUE_DIM
        weights.matrix(f"{linear}.in_proj_qkvz.weight", rows, HIDDEN_SIZE)
        weights.matrix(f"{linear}.in_proj_ba.weight", 2 * NUM_V_HEADS, HIDDEN_SIZE)
        draw_delta_rule(weights, linear)
    else:
        draw_gated_attention(weights, f"{prefix}.self_attn")
    _draw_mlp(weights, f"{prefix}.mlp")


def draw_mtp_layer(weights: WeightDrawer, index: int) -> None:
    """MTP layer ``index``."""
    prefix = f"mtp.layers.{index}"
    draw_norms(weights, prefix, HIDDEN_SIZE, mean=0.0)
    draw_gated_attention(weights, f"{prefix}.self_attn")
    _draw_mlp(weights, f"{prefix}.mlp")
    draw_mtp_frame(weights)


FAMILY = Family(
    name="qwen3_next",
    config=CONFIG,
    draw_trunk_layer=draw_trunk_layer,
    draw_mtp_layer=draw_mtp_layer,
    is_mtp_weight=is_mtp_weight,
    max_mtp_layers=1,
    norm_mean=0.0,
)
