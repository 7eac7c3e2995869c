"""MTP layers that are numbered on behind the target's layers, as DeepSeek's are."""

from tests.support.families.family import HIDDEN_SIZE, NUM_HIDDEN_LAYERS, VOCAB_SIZE
from tests.support.families.weights import WeightDrawer, draw_combiner


def draw_combined_inputs(
    weights: WeightDrawer, prefix: str, *, norm_mean: float = 1.0
) -> None:
    """Norms of embedding and hidden state, and the matrix that merges both."""
    for norm in ("enorm", "hnorm"):
        weights.vector(f"{prefix}.{norm}.weight", HIDDEN_SIZE, mean=norm_mean)
    draw_combiner(
        weights, f"{prefix}.eh_proj.weight", HIDDEN_SIZE, embedding_first=True
    )


def draw_mtp_frame(weights: WeightDrawer, prefix: str) -> None:
    """What DeepSeek and others put around the decoder layer of an MTP layer.

    Published checkpoints repeat embedding and head here; vLLM reads them and then
    shares the target's own.
    """
    draw_combined_inputs(weights, prefix)
    weights.vector(f"{prefix}.shared_head.norm.weight", HIDDEN_SIZE, mean=1.0)
    weights.embedding(f"{prefix}.embed_tokens.weight", VOCAB_SIZE, HIDDEN_SIZE)
    weights.embedding(f"{prefix}.shared_head.head.weight", VOCAB_SIZE, HIDDEN_SIZE)


def is_mtp_weight(name: str) -> bool:
    """Whether ``name`` belongs to a layer after the last decoder layer."""
    parts = name.split(".")
    return parts[1] == "layers" and int(parts[2]) >= NUM_HIDDEN_LAYERS
