"""The draft model of extra heads: vLLM's decoder layers, side by side on one state.

A head writes keys and values of its own, at the position whose hidden state it reads.
So a pass over the rows of a step leaves the KV cache of every head complete, and there
is nothing to write for draft tokens.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2DecoderLayer
from vllm.model_executor.models.utils import AutoWeightsLoader

from vllm_mtp.integration.extra_heads.registration import WEIGHTS

_NORM = "model.norm.weight"


def _llama_layer(vllm_config: VllmConfig, config: Any, prefix: str) -> nn.Module:
    return LlamaDecoderLayer(vllm_config, prefix, config)


def _qwen2_layer(vllm_config: VllmConfig, config: Any, prefix: str) -> nn.Module:
    return Qwen2DecoderLayer(
        config, vllm_config.cache_config, vllm_config.quant_config, prefix
    )


_LAYERS = {"llama": _llama_layer, "qwen2": _qwen2_layer}


class _Heads(nn.Module):
    """Layers, and the final norm of the target, of which this is a copy."""

    def __init__(self, layers: Iterable[nn.Module], config: Any) -> None:
        super().__init__()
        self.extra_heads = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class ExtraHeads(nn.Module):
    """As many heads as draft tokens may be asked for, whatever the checkpoint has."""

    lm_head: nn.Module
    """The target's: vLLM puts it here, as it does for MTP layers."""
    # Names within layers: those of Qwen2 are the same.
    hf_to_vllm_mapper = LlamaForCausalLM.hf_to_vllm_mapper
    packed_modules_mapping = LlamaForCausalLM.packed_modules_mapping

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        speculative = vllm_config.speculative_config
        assert speculative is not None
        self.config = config = speculative.draft_model_config.hf_config
        num_heads = min(config.n_predict, speculative.num_speculative_tokens)
        first = config.num_hidden_layers  # KV caches are numbered on from the target's
        make = _LAYERS[config.trunk]
        layers = (
            make(vllm_config, config, f"model.layers.{first + head}")
            for head in range(num_heads)
        )
        self.model = _Heads(layers, config)
        self.logits_processor = LogitsProcessor(
            config.vocab_size, scale=getattr(config, "logit_scale", 1.0)
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """vLLM asks every draft model for it; heads read no token."""
        raise NotImplementedError("extra heads read hidden states alone")

    def forward(
        self,
        input_ids: torch.Tensor | None,
        # [num_tokens]
        positions: torch.Tensor,
        # [num_tokens, hidden_size]
        hidden_states: torch.Tensor,
        **unused: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the head of the vocabulary reads, and what came in.

        Args:
            input_ids: The next token of each row, which is not looked at.
            positions: Of the rows.
            hidden_states: Of the target, before its last layer.
            **unused: vLLM's.

        Returns:
            ``[num_tokens, num_heads, hidden_size]`` and ``hidden_states``.
        """
        outputs = []
        for head in self.model.extra_heads:
            # A copy: layers add up their residual in place.
            output, residual = head(positions, hidden_states.clone(), None)
            outputs.append(self.model.norm(output, residual)[0])
        return torch.stack(outputs, dim=1), hidden_states

    def compute_logits(
        self,
        # [num_rows, hidden_size]: of one head, or of several
        hidden_states: torch.Tensor,
        spec_step_idx: int = 0,
    ) -> torch.Tensor | None:
        """``[num_rows, vocab_size]``, by the head of the vocabulary that all share."""
        logits: torch.Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Take heads and final norm out of the whole checkpoint."""
        own = tuple(f"{WEIGHTS}{i}." for i in range(len(self.model.extra_heads)))
        taken = (
            (name if name == _NORM else f"model.{name}", each)
            for name, each in weights
            if name == _NORM or name.startswith(own)
        )
        return AutoWeightsLoader(self).load_weights(
            taken, mapper=self.hf_to_vllm_mapper
        )
