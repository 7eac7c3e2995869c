"""Models with extra heads: what vLLM is told of them.

Gloeckle et al. 2024, "Better & Faster Large Language Models via Multi-token
Prediction": the model without its last layer is the trunk. The last layer predicts the
next token, and each of ``n_future_tokens - 1`` extra heads, one such layer more on the
same hidden state, a token further ahead. All run in one pass, and none is shown what
another drafts.

Their architectures have names of their own, since their checkpoints hold weights that
vLLM's own classes refuse: `targets` makes them load, with or without speculation.
"""

from collections.abc import Callable
from typing import Any

from vllm.config import SpeculativeConfig
from vllm.model_executor.models import ModelRegistry

from vllm_mtp.config import (
    METHOD,
    ConfigError,
)
from vllm_mtp.integration.load.wrapping import wrap_once
from vllm_mtp.split_options import (
    KEEPS_CACHED_BLOCK,
)

WEIGHTS = "extra_heads."
"""What the names of their weights begin with: ``extra_heads.{i}.self_attn...``."""

_PACKAGE = __package__
_DRAFT = "ExtraHeads"
_CLASSES = {
    "LlamaExtraHeadsForCausalLM": f"{_PACKAGE}.targets:LlamaWithExtraHeads",
    "Qwen2ExtraHeadsForCausalLM": f"{_PACKAGE}.targets:Qwen2WithExtraHeads",
    _DRAFT: f"{_PACKAGE}.drafts:ExtraHeads",
}
_TRUNKS = {
    "LlamaExtraHeadsForCausalLM": "llama",
    "Qwen2ExtraHeadsForCausalLM": "qwen2",
}
"""Whose layers heads are made of, by architecture of the target."""


def install() -> None:
    """Register the architectures; a second call changes nothing."""
    for name, path in _CLASSES.items():
        if name not in ModelRegistry.models:
            ModelRegistry.register_model(name, path)
    wrap_once(SpeculativeConfig, "hf_config_override", _wrap_override)


def has_extra_heads(speculative_config: Any) -> bool:
    """Whether drafts come from extra heads."""
    draft = speculative_config.draft_model_config
    return draft is not None and draft.architectures[0] == _DRAFT


def settle(speculative_config: Any, records_hidden_states: bool) -> None:
    """In the finished config of an engine, where drafts come from extra heads.

    Raises:
        ConfigError: More draft tokens than heads: each has one of its own. Or hidden
            states are to be recorded, which nothing trains such heads on.
    """
    if not has_extra_heads(speculative_config):
        return
    if records_hidden_states:
        raise ConfigError(
            "speculative_config.hidden_states_path is not allowed with extra heads: "
            "they are not what `vllm-mtp tune` trains; remove it."
        )
    asked = speculative_config.num_speculative_tokens
    num_heads = speculative_config.draft_model_config.hf_config.n_predict
    if asked > num_heads:
        raise ConfigError(
            f"speculative_config.num_speculative_tokens={asked} is not allowed with "
            f"method {METHOD!r}: must be at most {num_heads}, the model's number of "
            "extra heads, each of which drafts one token."
        )
    # Keys and values of a head know no token behind their position, so cached blocks
    # are right to the last one.
    setattr(speculative_config, KEEPS_CACHED_BLOCK, True)


def _wrap_override(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def hf_config_override(hf_config: Any) -> Any:
        trunk = _TRUNKS.get(hf_config.architectures[0])
        if trunk is None:
            return original(hf_config)
        num_tokens = getattr(hf_config, "n_future_tokens", None)
        hf_config.model_type = "mtp"
        hf_config.update(
            {
                "architectures": [_DRAFT],
                "trunk": trunk,
                "n_predict": num_tokens - 1 if isinstance(num_tokens, int) else None,
                # Whose input the heads read: vLLM counts the states between layers.
                "eagle_aux_hidden_state_layer_ids": [hf_config.num_hidden_layers - 1],
            }
        )
        return hf_config

    return hf_config_override
