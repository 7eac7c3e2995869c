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

_NUMBERED_AFTER_THE_TRUNK = r"model\.layers\.{after_trunk}\."

_WEIGHT_PATTERNS = {
    "MiMoMTPModel": r"model\.mtp_layers\.{index}\.",
    "ErnieMTPModel": r"model\.mtp_block\.{index}\.",
    "DeepSeekMTPModel": _NUMBERED_AFTER_THE_TRUNK,
    "DeepseekV32MTPModel": _NUMBERED_AFTER_THE_TRUNK,
    "Glm4MoeMTPModel": _NUMBERED_AFTER_THE_TRUNK,
    "Glm4MoeLiteMTPModel": _NUMBERED_AFTER_THE_TRUNK,
    "OpenPanguMTPModel": _NUMBERED_AFTER_THE_TRUNK,
    "Qwen3NextMTP": r"mtp\.",
    "Qwen3_5MTP": r"mtp\.",
    "Qwen3_5MoeMTP": r"mtp\.",
    "ExaoneMoeMTP": r"mtp\.",
}
"""Names of an MTP layer's weights in the checkpoint, by vLLM's draft architecture, as
the ``load_weights`` of its model file expects them."""

_READABLE_LOAD_FORMATS = frozenset({"auto", "hf", "safetensors", "fastsafetensors"})
"""Load formats that read the checkpoint's own names (``dummy`` needs no weights)."""


def count_mtp_layers(model_config: Any) -> int:
    """Number of MTP layers that the model's config promises.

    Args:
        model_config: vLLM's ``ModelConfig`` of the target.

    Raises:
        ConfigError: the model has none.
    """
    draft_config = draft_hf_config(model_config)
    num_layers = getattr(draft_config, "n_predict", None)
    if not isinstance(num_layers, int) or num_layers < 1:
        raise ConfigError(
            f"model {model_config.model!r} ({_architecture(model_config)}) has no MTP "
            f"layers: method {METHOD!r} needs a model that ships them, with at least "
            "one MTP layer in its config.json (for most families "
            "num_nextn_predict_layers >= 1)."
        )
    return num_layers


def check_mtp_weights(model_config: Any, load_format: str) -> None:
    """Refuse a checkpoint that lacks the weights of a promised MTP layer.

    Checkpoints of unknown families, in another format than safetensors, or without
    readable headers are left to vLLM's loader.

    Args:
        model_config: vLLM's ``ModelConfig`` of the target.
        load_format: as in ``--load-format``.

    Raises:
        ConfigError: names the first missing layer and the weights looked for.
    """
    patterns = weight_patterns(draft_hf_config(model_config))
    if not patterns or load_format not in _READABLE_LOAD_FORMATS:
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


def draft_hf_config(model_config: Any) -> Any:
    """The config of the draft model that vLLM makes of a target's."""
    # vLLM rewrites the config in place into that of the draft model.
    return SpeculativeConfig.hf_config_override(copy.deepcopy(model_config.hf_config))


def weight_patterns(draft_config: Any) -> list[str]:
    """One pattern per MTP layer; none for a family whose names are not known."""
    pattern = _WEIGHT_PATTERNS.get(draft_config.architectures[0])
    if pattern is None:
        return []
    start = getattr(draft_config, "num_hidden_layers", 0)
    return [
        pattern.replace("{index}", str(i)).replace("{after_trunk}", str(start + i))
        for i in range(draft_config.n_predict)
    ]


def _architecture(model_config: Any) -> str:
    return ", ".join(model_config.architectures or ["unknown architecture"])
