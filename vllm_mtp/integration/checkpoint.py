"""Does the model have MTP layers, and does its checkpoint hold their weights?

Both questions are answered from ``config.json`` and the headers of the safetensors
files, before a weight is loaded: a checkpoint that lost its MTP weights otherwise
serves with an untrained drafter at 0 % acceptance, silently.
"""

import copy
import re
from typing import Any

from vllm.config import SpeculativeConfig
from vllm.transformers_utils.config import get_safetensors_params_metadata

from vllm_mtp.config import METHOD, ConfigError

_LAYER_INDEX_FAMILIES = {
    "deepseek_mtp",
    "glm4_moe_mtp",
    "glm4_moe_lite_mtp",
    "pangu_ultra_moe_mtp",
    "exaone_moe_mtp",
}
"""Families whose MTP layers are numbered after the last decoder layer."""

_NAME_PATTERNS = {
    "mimo_mtp": r"model\.mtp_layers\.{index}\.",
    "ernie_mtp": r"model\.mtp_block\.{index}\.",
    "qwen3_next_mtp": r"mtp\.",
    "qwen3_5_mtp": r"mtp\.",
}
"""Names of the MTP layers' weights in the checkpoints of the other families."""


def count_mtp_layers(model_config: Any) -> int:
    """Number of MTP layers that the model's config promises.

    Args:
        model_config: vLLM's ``ModelConfig`` of the target.

    Raises:
        ConfigError: the model has none.
    """
    draft_config = _draft_hf_config(model_config)
    num_layers = getattr(draft_config, "n_predict", None)
    if not isinstance(num_layers, int) or num_layers < 1:
        raise ConfigError(
            f"model {model_config.model!r} ({_architecture(model_config)}) has no MTP "
            f"layers: method {METHOD!r} needs a model that ships them, with at least "
            "one MTP layer in its config.json (for most families "
            "num_nextn_predict_layers >= 1)."
        )
    return num_layers


def check_mtp_weights(model_config: Any) -> None:
    """Refuse a checkpoint that lacks the weights of a promised MTP layer.

    Checkpoints of unknown families, in another format than safetensors, or without
    readable headers are left to vLLM's loader.

    Raises:
        ConfigError: names the first missing layer and the weights looked for.
    """
    draft_config = _draft_hf_config(model_config)
    patterns = _weight_patterns(draft_config)
    if not patterns:
        return
    names = get_safetensors_params_metadata(
        model_config.model, revision=model_config.revision
    )
    if not names:
        return
    for index, pattern in enumerate(patterns):
        if not any(re.match(pattern, name) for name in names):
            wanted = pattern.replace("\\", "") + "*"
            raise ConfigError(
                f"model {model_config.model!r} promises {len(patterns)} MTP layer(s) "
                f"in config.json, but the weights of MTP layer {index} ({wanted}) are "
                "missing from its safetensors files: use a checkpoint that kept them."
            )


def _draft_hf_config(model_config: Any) -> Any:
    # vLLM rewrites the config in place into that of the draft model.
    return SpeculativeConfig.hf_config_override(copy.deepcopy(model_config.hf_config))


def _weight_patterns(draft_config: Any) -> list[str]:
    family = draft_config.model_type
    num_layers = draft_config.n_predict
    if family in _LAYER_INDEX_FAMILIES:
        start = draft_config.num_hidden_layers
        return [rf"model\.layers\.{start + i}\." for i in range(num_layers)]
    if family in _NAME_PATTERNS:
        pattern = _NAME_PATTERNS[family]
        return [pattern.replace("{index}", str(i)) for i in range(num_layers)]
    return []


def _architecture(model_config: Any) -> str:
    return ", ".join(model_config.architectures or ["unknown architecture"])
