"""Nemotron-H: Mamba-2 and attention in turns.

Published MTP layers have experts after their attention (``*E``). vLLM has no kernel for
these experts, which have no gate of their own, on a CPU.
"""

from tests.support.families.family import HIDDEN_SIZE, Family
from tests.support.families.weights import (
    ATTENTION_GAIN,
    WeightDrawer,
    draw_combiner,
    draw_grouped_query_attention,
)

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 32
NUM_MAMBA_HEADS, MAMBA_HEAD_DIM, STATE_SIZE, CONV_WIDTH = 2, 32, 16, 4
WIDTH = NUM_MAMBA_HEADS * MAMBA_HEAD_DIM

CONFIG = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M*",
    "mtp_hybrid_override_pattern": "*",
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "mamba_num_heads": NUM_MAMBA_HEADS,
    "mamba_head_dim": MAMBA_HEAD_DIM,
    "ssm_state_size": STATE_SIZE,
    "n_groups": 1,
    "conv_kernel": CONV_WIDTH,
    "chunk_size": 16,
}


def _draw_mamba(weights: WeightDrawer, prefix: str) -> None:
    channels = WIDTH + 2 * STATE_SIZE
    rows = WIDTH + channels + NUM_MAMBA_HEADS
    weights.matrix(f"{prefix}.in_proj.weight", rows, HIDDEN_SIZE)
    weights.convolution(f"{prefix}.conv1d.weight", channels, CONV_WIDTH)
    weights.vector(f"{prefix}.conv1d.bias", channels)
    # As in Qwen3-Next's linear attention: a state that outlives a few tokens.
    weights.vector(f"{prefix}.A_log", NUM_MAMBA_HEADS, mean=-1.5)
    weights.vector(f"{prefix}.dt_bias", NUM_MAMBA_HEADS)
    weights.vector(f"{prefix}.D", NUM_MAMBA_HEADS, mean=1.0)
    weights.vector(f"{prefix}.norm.weight", WIDTH, mean=1.0)
    weights.matrix(f"{prefix}.out_proj.weight", HIDDEN_SIZE, WIDTH, ATTENTION_GAIN)


def _draw_attention(weights: WeightDrawer, prefix: str) -> None:
    draw_grouped_query_attention(
        weights,
        prefix,
        width=HIDDEN_SIZE,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        bias=False,
    )


def draw_trunk_layer(weights: WeightDrawer, index: int) -> None:
    """Decoder layer ``index``."""
    prefix = f"backbone.layers.{index}"
    weights.vector(f"{prefix}.norm.weight", HIDDEN_SIZE, mean=1.0)
    draw = {"M": _draw_mamba, "*": _draw_attention}
    draw[CONFIG["hybrid_override_pattern"][index]](weights, f"{prefix}.mixer")


def draw_mtp_layer(weights: WeightDrawer, index: int) -> None:
    """MTP layer ``index``."""
    prefix = f"mtp.layers.{index}"
    for norm in ("enorm", "hnorm", "norm", "final_layernorm"):
        weights.vector(f"{prefix}.{norm}.weight", HIDDEN_SIZE, mean=1.0)
    draw_combiner(
        weights, f"{prefix}.eh_proj.weight", HIDDEN_SIZE, embedding_first=True
    )
    _draw_attention(weights, f"{prefix}.mixer")


FAMILY = Family(
    name="nemotron_h",
    config=CONFIG,
    draw_trunk_layer=draw_trunk_layer,
    draw_mtp_layer=draw_mtp_layer,
    is_mtp_weight=lambda name: name.startswith("mtp."),
    max_mtp_layers=1,
    embedding="backbone.embeddings.weight",
    final_norm="backbone.norm_f.weight",
)
