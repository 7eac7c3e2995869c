"""Targets whose checkpoints hold extra heads: vLLM's own classes, which pass over them.

Without speculation, or with another method, they serve like any other model.
"""

from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from vllm_mtp.integration.extra_heads.registration import WEIGHTS


class _PassesOverHeads:
    """Mixin of models, in front of vLLM's class."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        of_target = ((n, each) for n, each in weights if not n.startswith(WEIGHTS))
        base: Any = super()
        loaded: set[str] = base.load_weights(of_target)
        return loaded


class LlamaWithExtraHeads(_PassesOverHeads, LlamaForCausalLM):
    """A Llama model; checkpoint names are those of Llama."""


class Qwen2WithExtraHeads(_PassesOverHeads, Qwen2ForCausalLM):
    """A Qwen2 model. A MiMo model is one, but for its MTP layers."""
