"""What a model family is to the tests: a config and the names of its weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.families.weights import WeightDrawer

HIDDEN_SIZE = 64
NUM_HIDDEN_LAYERS = 2
VOCAB_SIZE = 512
MAX_POSITION = 512


@dataclass(frozen=True)
class Family:
    """How to write a small random checkpoint of one family."""

    name: str
    config: Mapping[str, Any]
    """``config.json`` without the keys that all families share, or with its own."""
    draw_trunk_layer: Callable[[WeightDrawer, int], None]
    """Draws decoder layer ``index`` of the target."""
    draw_mtp_layer: Callable[[WeightDrawer, int], None]
    """Draws MTP layer ``index``, numbered from 0."""
    is_mtp_weight: Callable[[str], bool]
    """Whether a weight's name belongs to an MTP layer."""
    num_mtp_layers: int = 1
    """Of a checkpoint, unless another number is asked for."""
    max_mtp_layers: int = 2
    """Most MTP layers that vLLM's loader knows names for."""
    counts_mtp_layers: bool = True
    """Whether ``config.json`` says how many there are; if not, vLLM takes one for
    granted."""
    assistant_config: Mapping[str, Any] | None = None
    """``config.json`` of the checkpoint that drafts, where that is one of its own."""
    norm_mean: float = 1.0
    """Of the weights of the target's last norm: 0 where the norm adds 1 to them."""
    cpu_attention_backend: str | None = None
    """The attention backend to insist on where vLLM runs on CPU."""
    mtp_layers_key: str = "num_nextn_predict_layers"
    """Where ``config.json`` says how many MTP layers there are."""
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    """Names of the target's weights that belong to no layer."""

    def config_json(self, num_mtp_layers: int) -> dict[str, Any]:
        """The whole ``config.json``.

        Args:
            num_mtp_layers: 0 is written out, because a missing key means one layer to
                some families' config classes.
        """
        return {
            "hidden_size": HIDDEN_SIZE,
            "num_hidden_layers": NUM_HIDDEN_LAYERS,
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": MAX_POSITION,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "dtype": "float32",
            self.mtp_layers_key: num_mtp_layers,
            **self.config,
        }
