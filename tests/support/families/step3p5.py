"""Step-3.5: several MTP layers run in turn, with sliding windows and own heads."""

from tests.support.families.family import (
    HIDDEN_SIZE,
    NUM_HIDDEN_LAYERS,
    Family,
)
from tests.support.families.numbered_layers import draw_combined_inputs, is_mtp_weight
from tests.support.families.weights import (
    MLP_GAIN,
    WeightDrawer,
    draw_grouped_query_attention,
    draw_mlp,
    draw_norms,
)

NUM_HEADS, NUM_SLIDING_HEADS, NUM_GROUPS, HEAD_DIM = 2, 4, 2, 32
INNER, EXPERT_INNER, NUM_EXPERTS = 96, 32, 4
NUM_MTP_LAYERS = 3
SLIDING = "sliding_attention"
LAYER_TYPES = ["full_attention", SLIDING] + [SLIDING] * NUM_MTP_LAYERS

CONFIG = {
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "intermediate_size": INNER,
    "num_attention_heads": NUM_HEADS,
    "num_attention_groups": NUM_GROUPS,
    "head_dim": HEAD_DIM,
    "attention_other_setting": {
        "attention_type": SLIDING,
        "num_attention_heads": NUM_SLIDING_HEADS,
        "num_attention_groups": NUM_GROUPS,
        "head_dim": HEAD_DIM,
    },
    "layer_types": LAYER_TYPES,
    # Shorter than the texts of the tests.
    "sliding_window": 16,
    "use_head_wise_attn_gate": True,
    "partial_rotary_factors": [0.5] + [1.0] * (len(LAYER_TYPES) - 1),
    "rope_theta": [500000.0] + [10000.0] * (len(LAYER_TYPES) - 1),
    "moe_layers_enum": "1",
    "moe_intermediate_size": EXPERT_INNER,
    "moe_num_experts": NUM_EXPERTS,
    "moe_top_k": 2,
    # Published: "sigmoid", which vLLM's router for CPUs has with expert groups only.
    "moe_router_activation": "softmax",
    "share_expert_dim": EXPERT_INNER,
}


def _draw_attention(weights: WeightDrawer, prefix: str, layer_type: str) -> None:
    num_heads = NUM_SLIDING_HEADS if layer_type == SLIDING else NUM_HEADS
    draw_norms(weights, prefix, HIDDEN_SIZE, mean=0.0)
    draw_grouped_query_attention(
        weights,
        f"{prefix}.self_attn",
        width=HIDDEN_SIZE,
        num_heads=num_heads,
        num_kv_heads=NUM_GROUPS,
        head_dim=HEAD_DIM,
        qk_norm_mean=2.5,
    )
    weights.matrix(f"{prefix}.self_attn.g_proj.weight", num_heads, HIDDEN_SIZE)


def _draw_experts(weights: WeightDrawer, prefix: str) -> None:
    """All experts' weights of a kind in one tensor."""
    weights.matrix(f"{prefix}.gate.weight", NUM_EXPERTS, HIDDEN_SIZE)
    weights.vector(f"{prefix}.router_bias", NUM_EXPERTS)
    inwards = NUM_EXPERTS, EXPERT_INNER, HIDDEN_SIZE
    weights.matrices(f"{prefix}.gate_proj.weight", *inwards)
    weights.matrices(f"{prefix}.up_proj.weight", *inwards)
    outwards = NUM_EXPERTS, HIDDEN_SIZE, EXPERT_INNER
    weights.matrices(f"{prefix}.down_proj.weight", *outwards, MLP_GAIN)


def draw_trunk_layer(weights: WeightDrawer, index: int) -> None:
    """Decoder layer ``index``."""
    prefix = f"model.layers.{index}"
    _draw_attention(weights, prefix, LAYER_TYPES[index])
    if index == 0:
        draw_mlp(weights, f"{prefix}.mlp", HIDDEN_SIZE, INNER)
        return
    _draw_experts(weights, f"{prefix}.moe")
    draw_mlp(weights, f"{prefix}.share_expert", HIDDEN_SIZE, EXPERT_INNER)


def draw_mtp_layer(weights: WeightDrawer, index: int) -> None:
    """MTP layer ``index``, with a head that it shares with nobody."""
    prefix = f"model.layers.{NUM_HIDDEN_LAYERS + index}"
    _draw_attention(weights, prefix, SLIDING)
    draw_mlp(weights, f"{prefix}.mlp", HIDDEN_SIZE, INNER)
    draw_combined_inputs(weights, prefix, norm_mean=0.0)
    head = f"{prefix}.transformer.shared_head"
    weights.vector(f"{head}.norm.weight", HIDDEN_SIZE, mean=0.0)
    weights.tensors[f"{head}.output.weight"] = weights.tensors["lm_head.weight"].clone()


FAMILY = Family(
    name="step3p5",
    config=CONFIG,
    draw_trunk_layer=draw_trunk_layer,
    draw_mtp_layer=draw_mtp_layer,
    is_mtp_weight=is_mtp_weight,
    num_mtp_layers=NUM_MTP_LAYERS,
    max_mtp_layers=NUM_MTP_LAYERS,
    norm_mean=0.0,
)
