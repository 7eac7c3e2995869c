"""Qwen3.5, dense and text only: Qwen3-Next's attention, with separate projections."""

from tests.support.families.family import HIDDEN_SIZE, Family
from tests.support.families.qwen3_next import (
    KEY_DIM,
    LINEAR_ATTENTION,
    NUM_V_HEADS,
    VALUE_DIM,
    draw_delta_rule,
    draw_gated_attention,
    draw_mtp_frame,
    is_mtp_weight,
)
from tests.support.families.weights import WeightDrawer, draw_mlp, draw_norms

INNER = 96

CONFIG = LINEAR_ATTENTION | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "intermediate_size": INNER,
    "mamba_ssm_dtype": "float32",
}


def draw_trunk_layer(weights: WeightDrawer, index: int) -> None:
    """Decoder layer ``index``."""
    prefix = f"model.layers.{index}"
    draw_norms(weights, prefix, HIDDEN_SIZE, mean=0.0)
    if CONFIG["layer_types"][index] == "linear_attention":
        linear = f"{prefix}.linear_attn"
        rows = {
            "qkv": 2 * KEY_DIM + VALUE_DIM,
            "z": VALUE_DIM,
            "b": NUM_V_HEADS,
            "a": NUM_V_HEADS,
        }
        for part, num_rows in rows.items():
            name = f"{linear}.in_proj_{part}.weight"
            weights.matrix(name, num_rows, HIDDEN_SIZE)
        draw_delta_rule(weights, linear)
    else:
        draw_gated_attention(weights, f"{prefix}.self_attn")
    draw_mlp(weights, f"{prefix}.mlp", HIDDEN_SIZE, INNER)


def draw_mtp_layer(weights: WeightDrawer, index: int) -> None:
    """MTP layer ``index``."""
    prefix = f"mtp.layers.{index}"
    draw_norms(weights, prefix, HIDDEN_SIZE, mean=0.0)
    draw_gated_attention(weights, f"{prefix}.self_attn")
    draw_mlp(weights, f"{prefix}.mlp", HIDDEN_SIZE, INNER)
    draw_mtp_frame(weights)


FAMILY = Family(
    name="qwen3_5",
    config=CONFIG,
    draw_trunk_layer=draw_trunk_layer,
    draw_mtp_layer=draw_mtp_layer,
    is_mtp_weight=is_mtp_weight,
    max_mtp_layers=1,
    mtp_layers_key="mtp_num_hidden_layers",
    norm_mean=0.0,
)
