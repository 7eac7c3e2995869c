"""DeepSeek-V3.2: DeepSeek-V3 with an indexer that chooses what attention reads."""

from tests.support.families import deepseek_v3, latent_attention
from tests.support.families.family import HIDDEN_SIZE, NUM_HIDDEN_LAYERS, Family
from tests.support.families.numbered_layers import is_mtp_weight
from tests.support.families.weights import WeightDrawer

NUM_INDEX_HEADS, INDEX_HEAD_DIM = 4, 128

CONFIG = {
    **deepseek_v3.CONFIG,
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_topk": 32,
    "index_n_heads": NUM_INDEX_HEADS,
    "index_head_dim": INDEX_HEAD_DIM,
}


def _draw_indexer(weights: WeightDrawer, layer: int) -> None:
    prefix = f"model.layers.{layer}.self_attn.indexer"
    rows = NUM_INDEX_HEADS * INDEX_HEAD_DIM
    weights.matrix(f"{prefix}.wq_b.weight", rows, latent_attention.Q_RANK)
    weights.matrix(f"{prefix}.wk.weight", INDEX_HEAD_DIM, HIDDEN_SIZE)
    weights.vector(f"{prefix}.k_norm.weight", INDEX_HEAD_DIM, mean=1.0)
    weights.vector(f"{prefix}.k_norm.bias", INDEX_HEAD_DIM)
    weights.matrix(f"{prefix}.weights_proj.weight", NUM_INDEX_HEADS, HIDDEN_SIZE)


def draw_trunk_layer(weights: WeightDrawer, index: int) -> None:
    """Decoder layer ``index``."""
    deepseek_v3.draw_trunk_layer(weights, index)
    _draw_indexer(weights, index)


def draw_mtp_layer(weights: WeightDrawer, index: int) -> None:
    """MTP layer ``index``."""
    deepseek_v3.draw_mtp_layer(weights, index)
    _draw_indexer(weights, NUM_HIDDEN_LAYERS + index)


FAMILY = Family(
    name="deepseek_v32",
    config=CONFIG,
    draw_trunk_layer=draw_trunk_layer,
    draw_mtp_layer=draw_mtp_layer,
    is_mtp_weight=is_mtp_weight,
)
