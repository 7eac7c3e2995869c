"""GLM-4.7-Flash: multi-head latent attention in GLM's frame."""

from tests.support.families import deepseek_v3, latent_attention
from tests.support.families.family import Family
from tests.support.families.numbered_layers import is_mtp_weight

CONFIG = {
    **deepseek_v3.CONFIG,
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "n_group": 1,
}

FAMILY = Family(
    name="glm4_moe_lite",
    config=CONFIG,
    draw_trunk_layer=deepseek_v3.draw_trunk_layer,
    draw_mtp_layer=deepseek_v3.draw_mtp_layer,
    is_mtp_weight=is_mtp_weight,
    cpu_attention_backend=latent_attention.CPU_BACKEND,
)
