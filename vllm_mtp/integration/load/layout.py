"""How vLLM's draft model can be given the MTP weights of a checkpoint.

Converters leave MTP layers as they were while they quantize the trunk, keep them in a
file that the index does not list, put ``language_model.`` before every name, and heads
are published alone, quantized or not unlike the target. vLLM builds the draft model
with the target's quantization and reads the listed files under their own names. Where
that leaves weights out, other layouts are tried on the meta device (`trial.py`), and
the first that takes all of them is the one to load by.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.transformers_utils.config import get_hf_text_config

Quantization = Literal["target", "own", "none"]

_NUMBER = re.compile(r"\d+")
_MAX_PREFIX_PARTS = 2


@dataclass(frozen=True)
class Layout:
    """Differences from how vLLM loads by itself."""

    quantization: Quantization = "target"
    """By whose quantization config the MTP layers are built."""
    prefix: str = ""
    """Of the weights' names, which vLLM's model does not expect."""
    files: tuple[str, ...] = ()
    """Names of files that the index does not list."""

    def describe(self) -> str:
        """What is said of it at start; empty where there is no difference."""
        words = {
            "none": "not quantized, unlike the model",
            "own": "quantized unlike the model",
        }
        parts = [
            words.get(self.quantization, ""),
            f"names begin with {self.prefix!r}" if self.prefix else "",
            f"also in {', '.join(self.files)}, not listed" if self.files else "",
        ]
        return "; ".join(part for part in parts if part)


USUAL = Layout()


def quantizations(config: VllmConfig) -> list[Quantization]:
    """Whose quantization configs differ, the target's first."""
    speculative = config.speculative_config
    assert speculative is not None
    draft = speculative.draft_model_config
    found: list[Quantization] = ["target"]
    if draft.model != config.model_config.model and quant_config(config, "own"):
        found.append("own")
    if config.quant_config is not None:
        found.append("none")
    return found


def quant_config(config: VllmConfig, quantization: Quantization) -> Any:
    """vLLM's quantization config to build the draft model with; None for none."""
    if quantization == "target":
        return config.quant_config
    if quantization == "none":
        return None
    assert config.speculative_config is not None
    draft = config.speculative_config.draft_model_config
    return VllmConfig.get_quantization_config(draft, config.load_config)


def config_to_build_by(config: VllmConfig, quantization: Quantization) -> VllmConfig:
    """The config that vLLM's draft model is to be built with, a copy if it differs.

    Most of vLLM's draft models read the target's config. Whatever it does not say or
    says is 0, such as the number of MTP layers, is taken from that of the head.
    """
    assert config.speculative_config is not None
    draft = config.speculative_config.draft_model_config
    is_head = draft.model != config.model_config.model
    if quantization == "target" and not is_head:
        return config
    changed = copy.copy(config)
    changed.quant_config = quant_config(config, quantization)
    if is_head:
        changed.model_config = target = copy.copy(config.model_config)
        target.hf_config = copy.deepcopy(target.hf_config)
        _complete(target.hf_config, draft.hf_config)
        target.hf_text_config = get_hf_text_config(target.hf_config)
    return changed


def _complete(config: PretrainedConfig, other: PretrainedConfig) -> None:
    for key, value in vars(other).items():
        if key == "quantization_config" or key.startswith("_"):
            continue
        own = getattr(config, key, None)
        if own is None or (own == 0 and not isinstance(own, bool)):
            setattr(config, key, value)
        elif isinstance(own, PretrainedConfig) and isinstance(value, PretrainedConfig):
            _complete(own, value)


def prefixes(names: Mapping[str, Any]) -> Iterator[str]:
    """Beginnings of names, up to a layer's number, that a converter may have added."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        for end in range(1, min(_MAX_PREFIX_PARTS, len(parts) - 2) + 1):
            if _NUMBER.fullmatch(parts[end]):
                break
            found[".".join(parts[:end]) + "."] = None
    yield from found
