"""openPangu-Ultra-MoE: multi-head latent attention between norms, DeepSeek's frame."""

from tests.support.families import deepseek_v3, latent_attention
from tests.support.families.family import HIDDEN_SIZE, NUM_HIDDEN_LAYERS, Family
from tests.support.families.numbered_layers import is_mtp_weight
from tests.support.families.weights import WeightDrawer

CONFIG = {
    **deepseek_v3.CONFIG,
    "architectures": ["PanguUltraMoEForCausalLM"],
    "model_type": "pangu_ultra_moe",
    "sandwich_norm": True,
    # Another word of the target's loader for it than of the draft model's.
    "router_enable_expert_bias": False,
}


def _adapt(weights: WeightDrawer, index: int) -> None:
    bias = f"model.layers.{index}.mlp.gate.e_score_correction_bias"
    weights.tensors.pop(bias, None)
    for norm in ("pre_mlp_layernorm", "post_mlp_layernorm"):
        name = f"model.layers.{index}.{norm}.weight"
        weights.vector(name, HIDDEN_SIZE, mean=1.0)


def draw_trunk_layer(weights: WeightDrawer, index: int) -> None:
    """Decoder layer ``index``."""
    deepseek_v3.draw_trunk_layer(weights, index)
    _adapt(weights, index)


def draw_mtp_layer(weights: WeightDrawer, index: int) -> None:
    """MTP layer ``index``."""
    deepseek_v3.draw_mtp_layer(weights, index)
    _adapt(weights, NUM_HIDDEN_LAYERS + index)


FAMILY = Family(
    name="openpangu",
    config=CONFIG,
    draw_trunk_layer=draw_trunk_layer,
    draw_mtp_layer=draw_mtp_layer,
    is_mtp_weight=is_mtp_weight,
    cpu_attention_backend=latent_attention.CPU_BACKEND,
)
