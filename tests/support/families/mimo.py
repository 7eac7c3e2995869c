"""MiMo: a dense Qwen2-style decoder."""

from tests.support.families.family import HIDDEN_SIZE, Family
from tests.support.families.weights import (
    WeightDrawer,
    draw_combiner,
    draw_grouped_query_attention,
    draw_mlp,
    draw_norms,
)

NUM_HEADS, NUM_KV_HEADS, INNER = 2, 1, 96

CONFIG = {
    "architectures": ["MiMoForCausalLM"],
    # vLLM knows MiMo by its architecture; `mimo` itself would need remote code.
    "model_type": "qwen2",
    "intermediate_size": INNER,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def _draw_decoder_layer(weights: WeightDrawer, prefix: str) -> None:
    draw_norms(weights, prefix, HIDDEN_SIZE)
    draw_grouped_query_attention(
        weights,
        f"{prefix}.self_attn",
        width=HIDDEN_SIZE,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HIDDEN_SIZE // NUM_HEADS,
        bias=True,
    )
    draw_mlp(weights, f"{prefix}.mlp", HIDDEN_SIZE, INNER)


def draw_trunk_layer(weights: WeightDrawer, index: int) -> None:
    """Decoder layer ``index``."""
    _draw_decoder_layer(weights, f"model.layers.{index}")


def draw_mtp_layer(weights: WeightDrawer, index: int) -> None:
    """MTP layer ``index``."""
    prefix = f"model.mtp_layers.{index}"
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights.vector(f"{prefix}.{norm}.weight", HIDDEN_SIZE, mean=1.0)
    draw_combiner(
        weights, f"{prefix}.input_proj.weight", HIDDEN_SIZE, embedding_first=False
    )
    _draw_decoder_layer(weights, prefix)


FAMILY = Family(
    name="mimo",
    config=CONFIG,
    draw_trunk_layer=draw_trunk_layer,
    draw_mtp_layer=draw_mtp_layer,
    is_mtp_weight=lambda name: ".mtp_layers." in name,
)
