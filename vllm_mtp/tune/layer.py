"""An MTP layer to train: a family's decoder layer from transformers, and its frame."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig

from vllm_mtp.tune.attention import NAME, Chain
from vllm_mtp.tune.families import Family


class MTPLayer(nn.Module):
    """One MTP layer, as vLLM serves it."""

    def __init__(self, family: Family, config: Mapping[str, Any], index: int) -> None:
        """Weights are not initialized.

        Args:
            family: Of the model.
            config: Its ``config.json``, that of the text model where there are several.
            index: Of the MTP layer, from 0.
        """
        super().__init__()
        self.family = family
        hf_config = _text_config(family, config)
        after = hf_config.num_hidden_layers + index
        names = {"index": index, "after": after}
        self.prefix = family.prefix.format(**names)
        self.block_prefix = family.block.format(**names)
        module = _modeling(hf_config)
        layer_class = _class_ending(module, "DecoderLayer")
        self.block = layer_class(hf_config, after)
        norm_class: Callable[..., nn.Module] = type(self.block.input_layernorm)
        width, eps = hf_config.hidden_size, hf_config.rms_norm_eps
        self.token_norm = norm_class(width, eps=eps)
        self.hidden_norm = norm_class(width, eps=eps)
        self.final_norm = norm_class(width, eps=eps)
        self.projection = nn.Linear(2 * width, width, bias=False)
        self.rotary = _class_ending(module, "RotaryEmbedding")(hf_config)

    def forward(
        self,
        # [batch, seq, hidden]: the trunk's, or the output of the step before
        previous: torch.Tensor,
        # [batch, seq, hidden], of the tokens that follow
        embeddings: torch.Tensor,
        # [batch, seq] int64
        positions: torch.Tensor,
        chain: Chain,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft step of every draft.

        Returns:
            ``[batch, seq, hidden]`` each: what the head reads, and what the next step
            gets.
        """
        if self.family.masks_first:
            embeddings = embeddings.masked_fill((positions == 0)[..., None], 0)
        parts = [self.token_norm(embeddings), self.hidden_norm(previous)]
        if not self.family.embedding_first:
            parts.reverse()
        hidden = self.projection(torch.cat(parts, -1))
        hidden = self.block(
            hidden,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=self.rotary(hidden, positions),
            chain=chain,
        )
        normed = self.final_norm(hidden)
        return normed, normed if self.family.returns_normed else hidden

    def load(self, tensor: Callable[[str], torch.Tensor]) -> None:
        """Take the weights of a checkpoint.

        Args:
            tensor: Reads one by its name.
        """
        with torch.no_grad():
            for name, weight in self.stored(self.state_dict()).items():
                weight.copy_(tensor(name))

    def names(self) -> list[str]:
        """Of its weights in the checkpoint."""
        return list(self.stored(self.state_dict()))

    def stored(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Weights, or parts of them, by their names in the checkpoint.

        Args:
            state: The module's, whole: on several ranks each has a part of it.
        """
        frame = ("token_norm", "hidden_norm", "projection", "final_norm")
        found = {}
        for name, tensor in state.items():
            part, _, rest = name.partition(".")
            if part == "block":
                for own, view in _by_expert(rest, tensor):
                    found[self.block_prefix + own] = view
            else:
                assert part in frame, name
                found[f"{self.prefix}{getattr(self.family, part)}.{rest}"] = tensor
        return found


def _by_expert(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """transformers keeps the weights of all experts together, checkpoints do not."""
    before, found, last = name.partition(".experts.")
    if not found:
        return [(name, tensor)]
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    return [
        (f"{before}.experts.{expert}.{part}.weight", view)
        for expert, weight in enumerate(tensor)
        for part, view in zip(parts[last], weight.chunk(len(parts[last])), strict=True)
    ]


def _text_config(family: Family, config: Mapping[str, Any]) -> PretrainedConfig:
    given = {k: v for k, v in config.items() if k not in ("architectures", "dtype")}
    given["model_type"] = family.model_type
    made = CONFIG_MAPPING[family.model_type](**given)
    kinds = getattr(made, "layer_types", None)
    if kinds is not None:  # MTP layers have numbers of their own
        made.layer_types = [*kinds, *["full_attention"] * 8]
    made._attn_implementation = NAME
    return made


def _modeling(config: PretrainedConfig) -> Any:
    package = type(config).__module__.rpartition(".")[0]
    name = package.rpartition(".")[2]
    return importlib.import_module(f"{package}.modeling_{name}")


def _class_ending(module: Any, ending: str) -> Any:
    """A family's modeling file defines one decoder layer and one rotary embedding, and
    where it can see, others for that."""
    (found,) = (
        each
        for name, each in vars(module).items()
        if name.endswith(ending)
        and getattr(each, "__module__", None) == module.__name__
        and "Vision" not in name
    )
    return found
