"""LongCat-Flash: two attentions and two MLPs a layer beside experts, of which some do
nothing; the MTP layer is a dense one of DeepSeek's kind."""

from tests.support.families import latent_attention
from tests.support.families.family import HIDDEN_SIZE, NUM_HIDDEN_LAYERS, Family
from tests.support.families.weights import (
    WeightDrawer,
    draw_combiner,
    draw_mlp,
    draw_norms,
)

INNER, EXPERT_INNER, NUM_EXPERTS, NUM_ZERO_EXPERTS = 96, 32, 4, 2

CONFIG = {
    "architectures": ["LongcatFlashForCausalLM"],
    "model_type": "longcat_flash",
    **latent_attention.CONFIG,
    # Of a layer's two attentions each is counted.
    "num_hidden_layers": 2 * NUM_HIDDEN_LAYERS,
    "num_layers": NUM_HIDDEN_LAYERS,
    "ffn_hidden_size": INNER,
    "expert_ffn_hidden_size": EXPERT_INNER,
    "n_routed_experts": NUM_EXPERTS,
    "moe_topk": 2,
    "zero_expert_num": NUM_ZERO_EXPERTS,
    "zero_expert_type": "identity",
    "routed_scaling_factor": 1.0,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}

KV_NORM_MEAN = 2.0
"""``mla_scale_kv_lora`` makes keys and values small, for the model is narrow here."""


def _draw_attention(weights: WeightDrawer, prefix: str) -> None:
    latent_attention.draw_latent_attention(weights, prefix, kv_norm_mean=KV_NORM_MEAN)


def draw_trunk_layer(weights: WeightDrawer, index: int) -> None:
    """Decoder layer ``index``."""
    prefix = f"model.layers.{index}"
    for half in range(2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights.vector(f"{prefix}.{norm}.{half}.weight", HIDDEN_SIZE, mean=1.0)
        _draw_attention(weights, f"{prefix}.self_attn.{half}")
        draw_mlp(weights, f"{prefix}.mlps.{half}", HIDDEN_SIZE, INNER)
    num_scores = NUM_EXPERTS + NUM_ZERO_EXPERTS
    router = f"{prefix}.mlp.router"
    weights.matrix(f"{router}.classifier.weight", num_scores, HIDDEN_SIZE)
    weights.vector(f"{router}.e_score_correction_bias", num_scores)
    for expert in range(NUM_EXPERTS):
        name = f"{prefix}.mlp.experts.{expert}"
        draw_mlp(weights, name, HIDDEN_SIZE, EXPERT_INNER)


def draw_mtp_layer(weights: WeightDrawer, index: int) -> None:
    """The MTP layer."""
    prefix = f"model.mtp.layers.{index}"
    for norm in ("enorm", "hnorm"):
        weights.vector(f"{prefix}.{norm}.m.weight", HIDDEN_SIZE, mean=1.0)
    draw_combiner(
        weights, f"{prefix}.eh_proj.weight", HIDDEN_SIZE, embedding_first=True
    )
    draw_norms(weights, prefix, HIDDEN_SIZE)
    _draw_attention(weights, f"{prefix}.self_attn")
    draw_mlp(weights, f"{prefix}.transformer_layer.mlp", HIDDEN_SIZE, INNER)
    weights.vector("model.mtp.norm.weight", HIDDEN_SIZE, mean=1.0)


FAMILY = Family(
    name="longcat_flash",
    config=CONFIG,
    draw_trunk_layer=draw_trunk_layer,
    draw_mtp_layer=draw_mtp_layer,
    is_mtp_weight=lambda name: name.startswith("model.mtp."),
    max_mtp_layers=1,
    counts_mtp_layers=False,
    cpu_attention_backend=latent_attention.CPU_BACKEND,
)
