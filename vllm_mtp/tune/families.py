"""How each family's checkpoint stores an MTP layer, and how its parts are joined.

Sources: vLLM's ``model_executor/models/*_mtp.py``. A test compares what is built here
with the layer that vLLM serves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_mtp.config import ConfigError


@dataclass(frozen=True)
class Family:
    """Of MTP layers. ``{index}`` stands for the number of one, from 0, and ``{after}``
    for that number after those of the trunk's layers."""

    model_type: str
    """transformers' name of the family whose decoder layer is in it."""
    prefix: str
    """Of all names but the block's."""
    block: str
    """Prefix of the decoder layer's names."""
    token_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    embedding_first: bool = True
    """The embedding comes first in what is projected, then the hidden state."""
    masks_first: bool = True
    """The embedding at position 0 counts as zeros."""
    returns_normed: bool = True
    """The next draft step gets the output after the final norm."""
    trunk_is_normed: bool = True
    """The hidden state that the trunk hands over has been through its final norm."""
    trunk: str = "model."
    """Prefix of the trunk's names."""
    runs_several: bool = False
    """vLLM can run a layer for each draft step."""


_DEEPSEEK = Family(
    "deepseek_v3",
    prefix="model.layers.{after}.",
    block="model.layers.{after}.",
    token_norm="enorm",
    hidden_norm="hnorm",
    projection="eh_proj",
    final_norm="shared_head.norm",
    runs_several=True,
)
_QWEN = Family(
    "qwen3_next",
    prefix="mtp.",
    block="mtp.layers.{index}.",
    token_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    projection="fc",
    final_norm="norm",
    masks_first=False,
)

FAMILIES: Mapping[str, Family] = {
    "MiMoForCausalLM": Family(
        "qwen2",
        prefix="model.mtp_layers.{index}.",
        block="model.mtp_layers.{index}.",
        token_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        projection="input_proj",
        final_norm="final_layernorm",
        embedding_first=False,
        trunk_is_normed=False,
    ),
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "Glm4MoeForCausalLM": Family(
        **{**vars(_DEEPSEEK), "model_type": "glm4_moe", "returns_normed": False}
    ),
    "Qwen3NextForCausalLM": _QWEN,
    "Qwen3_5ForCausalLM": Family(**{**vars(_QWEN), "model_type": "qwen3_5_text"}),
    "Qwen3_5ForConditionalGeneration": Family(
        **{
            **vars(_QWEN),
            "model_type": "qwen3_5_text",
            "trunk": "model.language_model.",
        }
    ),
}
"""By the target's architecture."""


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a ``config.json``.

    Raises:
        ConfigError: None that can be tuned.
    """
    for architecture in config.get("architectures", ()):
        if architecture in FAMILIES:
            return FAMILIES[architecture]
    raise ConfigError(
        f"model: {', '.join(config.get('architectures', ())) or 'no architecture'} is "
        f"not a family that can be tuned; those are {', '.join(FAMILIES)}"
    )
