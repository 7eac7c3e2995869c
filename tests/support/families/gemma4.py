"""Gemma 4: an assistant checkpoint drafts, with queries only, from the target's KV."""

from tests.support.families.family import (
    HIDDEN_SIZE,
    MAX_POSITION,
    NUM_HIDDEN_LAYERS,
    VOCAB_SIZE,
    Family,
)
from tests.support.families.weights import (
    WeightDrawer,
    draw_grouped_query_attention,
    draw_mlp,
)

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, INNER = 2, 1, 32, 96
WIDTH = 48
"""Of the assistant."""
ASSISTANT = "assistant."

CONFIG = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "intermediate_size": INNER,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "global_head_dim": HEAD_DIM,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"],
    # Shorter than the texts of the tests.
    "sliding_window": 16,
}

ASSISTANT_CONFIG = {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": HIDDEN_SIZE,
    "tie_word_embeddings": True,
    "dtype": "float32",
    "text_config": {
        **CONFIG,
        "hidden_size": WIDTH,
        "vocab_size_per_layer_input": 0,
        "num_hidden_layers": NUM_HIDDEN_LAYERS,
        "num_kv_shared_layers": NUM_HIDDEN_LAYERS,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITION,
    },
}

POST_NORM = 9.0
"""What a layer adds is normed last, and meets embeddings of size 8."""


def _draw_layer(weights: WeightDrawer, prefix: str, width: int, gain: float) -> None:
    for norm, mean in (
        ("input_layernorm", 1.0),
        ("post_attention_layernorm", gain),
        ("pre_feedforward_layernorm", 1.0),
        ("post_feedforward_layernorm", gain / 2),
    ):
        weights.vector(f"{prefix}.{norm}.weight", width, mean=mean)
    weights.vector(f"{prefix}.layer_scalar", 1, mean=1.0)
    draw_grouped_query_attention(
        weights,
        f"{prefix}.self_attn",
        width=width,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        qk_norm_mean=0.8,  # attention does not scale its scores
    )
    draw_mlp(weights, f"{prefix}.mlp", width, INNER)


def draw_trunk_layer(weights: WeightDrawer, index: int) -> None:
    """Decoder layer ``index``."""
    _draw_layer(weights, f"model.layers.{index}", HIDDEN_SIZE, POST_NORM)


def draw_mtp_layer(weights: WeightDrawer, index: int) -> None:
    """The assistant, of all its layers, which make one draft token together.

    It sees the target's embeddings and knows tokens by their projections to its width.
    """
    model = f"{ASSISTANT}model"
    project = f"{ASSISTANT}pre_projection.weight"
    weights.matrix(project, WIDTH, 2 * HIDDEN_SIZE)
    weights.tensors[project][:, HIDDEN_SIZE:] *= 0.5
    seen = weights.tensors[project][:, :HIDDEN_SIZE]
    head = weights.tensors["lm_head.weight"] @ seen.T
    weights.tensors[f"{model}.embed_tokens.weight"] = head.contiguous()
    weights.matrix(f"{ASSISTANT}post_projection.weight", HIDDEN_SIZE, WIDTH)
    weights.vector(f"{model}.norm.weight", WIDTH, mean=1.0)
    for layer in range(NUM_HIDDEN_LAYERS):
        prefix = f"{model}.layers.{layer}"
        _draw_layer(weights, prefix, WIDTH, POST_NORM / 2)
        for part in ("k_proj", "v_proj", "k_norm"):
            del weights.tensors[f"{prefix}.self_attn.{part}.weight"]


FAMILY = Family(
    name="gemma4",
    config=CONFIG,
    assistant_config=ASSISTANT_CONFIG,
    draw_trunk_layer=draw_trunk_layer,
    draw_mtp_layer=draw_mtp_layer,
    is_mtp_weight=lambda name: name.startswith(ASSISTANT),
    max_mtp_layers=1,
    counts_mtp_layers=False,
)
