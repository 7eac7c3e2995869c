"""Growing a checkpoint to the cost of a bigger model, function unchanged.

A small model drafts as dearly as it verifies, so it cannot show what
speculation gains. Grown, it keeps its tokens and its acceptance, and gets the
ratio of draft to target cost of the bigger model: a benchmark needs no GPU.

Each step is exact in real arithmetic:

- layers: new decoder layers have zero output projections, so they add 0;
- MLP: new rows of gate and up feed zero columns of down;
- hidden size: new channels of the residual stream are 0. A mean over
  d' instead of d channels shrinks by d / d', so eps shrinks with it and norm
  weights are multiplied by sqrt(d / d'). The head size stays, so the number
  of heads grows by d' / d; the new heads meet zero columns of the output
  projection;
- vocabulary: new tokens have logit 0, which a greedy choice never picks as
  long as some real token's logit is positive. If the hidden size grows, too,
  their logits are below -30, and sampling draws none either: see
  `_silence`, the one step that is exact to float32's rounding only.

What a zero makes dead is filled with random numbers, so that no kernel can
win time on zeros. Norm weights change by a power of two when d' / d is a
power of 4; other factors round in 16 bits.
"""

import math
import re

import torch
from pydantic import BaseModel, ConfigDict, Field

from examples.tiny_model.shape import ModelShape

Weights = dict[str, torch.Tensor]

MTP_PREFIX = "model.mtp_layers."
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_FILL_STD = 0.02

_TRACE = 2.0**-20
"""In the residual stream's first new channel, whatever the token."""
_TRUNK_GAIN, _MTP_GAIN = 2.0**7, 2.0**4
"""Of that channel in the last norms. The MTP layer's output goes back into it, so there
the square of what is made of it must be nothing beside the others'."""
_AGAINST = -(2.0**24)
"""Of that channel to the logit of a new token: more than 16 bits of float16 hold."""


class Expansion(BaseModel):
    """Sizes to grow to; a size left out stays as it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_hidden_layers: int | None = Field(default=None, ge=1)
    intermediate_size: int | None = Field(default=None, ge=1)
    hidden_size: int | None = Field(default=None, ge=1)
    vocab_size: int | None = Field(default=None, ge=1)

    def apply_to(self, shape: ModelShape) -> ModelShape:
        """The shape after expansion.

        Raises:
            ValueError: If nothing grows, a size would shrink, or the hidden
                size is not one that whole groups of heads fill.
        """
        wanted = self.model_dump(exclude_none=True)
        for field, size in wanted.items():
            if size < getattr(shape, field):
                raise ValueError(
                    f"{field}: {size} is smaller than the checkpoint's "
                    f"{getattr(shape, field)}; expected that size or more"
                )
        if all(size == getattr(shape, field) for field, size in wanted.items()):
            raise ValueError(
                "expansion: no size grows; expected at least one of "
                f"{', '.join(Expansion.model_fields)} above the checkpoint's"
            )
        hidden = wanted.get("hidden_size", shape.hidden_size)
        return ModelShape.model_validate(
            shape.model_dump() | wanted | _widened_attention(shape, hidden)
        )


def _widened_attention(shape: ModelShape, hidden_size: int) -> dict[str, float]:
    """Head counts and eps that go with a new hidden size."""
    heads_per_group = shape.num_heads // shape.num_kv_heads
    group_width = heads_per_group * shape.head_dim
    if hidden_size % group_width:
        raise ValueError(
            f"hidden_size: {hidden_size} is not a multiple of {group_width} "
            f"({heads_per_group} query heads of {shape.head_dim} that share a "
            "key head)"
        )
    return {
        "num_heads": hidden_size // shape.head_dim,
        "num_kv_heads": hidden_size // group_width,
        "rms_norm_eps": shape.rms_norm_eps * shape.hidden_size / hidden_size,
    }


class _Filler:
    """Embeds a tensor in the corner of a bigger one."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def random(self, *size: int) -> torch.Tensor:
        return torch.empty(size).normal_(0, _FILL_STD, generator=self._generator)

    def grow(self, old: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
        grown = self.random(*size)
        grown[tuple(slice(length) for length in old.shape)] = old
        return grown


def _grow_linear(
    name: str, old: torch.Tensor, size: tuple[int, ...], filler: _Filler
) -> torch.Tensor:
    """Grows a projection. Outputs into the residual stream get zeros."""
    grown = filler.grow(old, size)
    if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight")):
        grown[old.shape[0] :] = 0
        grown[:, old.shape[1] :] = 0
    elif name.endswith("lm_head.weight"):
        grown[old.shape[0] :, : old.shape[1]] = 0
    return grown


def _grow_input_proj(
    old: torch.Tensor, hidden_size: int, filler: _Filler
) -> torch.Tensor:
    """Grows `[d, 2 d]`: its columns are the hidden state, then the embedding."""
    old_size = old.shape[0]
    grown = filler.random(hidden_size, 2 * hidden_size)
    grown[old_size:] = 0
    for half in range(2):
        source = old[:, half * old_size : (half + 1) * old_size]
        start = half * hidden_size
        grown[:old_size, start : start + old_size] = source
    return grown


def _grow(
    name: str, old: torch.Tensor, old_shape: ModelShape, new: ModelShape, fill: _Filler
) -> torch.Tensor:
    """Grows one tensor from the old shape to the new one."""
    if name.endswith("norm.weight"):
        scale = math.sqrt(old_shape.hidden_size / new.hidden_size)
        return torch.cat(
            (old, torch.ones(new.hidden_size - old_shape.hidden_size))
        ).mul_(scale)
    if name.endswith("input_proj.weight"):
        return _grow_input_proj(old, new.hidden_size, fill)
    return _grow_linear(name, old, _size_of(name, new), fill)


def _size_of(name: str, shape: ModelShape) -> tuple[int, ...]:
    """Size of a projection, its bias, the embedding or the head."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    sizes = {
        "q_proj": (hidden, hidden),
        "k_proj": (shape.kv_width, hidden),
        "v_proj": (shape.kv_width, hidden),
        "o_proj": (hidden, hidden),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "embed_tokens": (shape.vocab_size, hidden),
        "lm_head": (shape.vocab_size, hidden),
    }
    *_, module, kind = name.split(".")
    size = sizes[module]
    return size[:1] if kind == "bias" else size


def _new_layers(weights: Weights, first: int, last: int, filler: _Filler) -> Weights:
    """Layers `first`..`last - 1`, shaped like layer 0, that add exactly 0."""
    template = {
        name: weight for name, weight in weights.items() if ".layers.0." in name
    }
    layers: Weights = {}
    for index in range(first, last):
        for name, weight in template.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                value = torch.zeros_like(weight)
            elif name.endswith("layernorm.weight"):
                value = weight.clone()
            else:
                value = filler.random(*weight.shape)
            layers[name.replace(".layers.0.", f".layers.{index}.")] = value
    return layers


def silences(old: ModelShape, new: ModelShape) -> bool:
    """Whether new tokens get logits so low that sampling never draws them."""
    return new.vocab_size > old.vocab_size and new.hidden_size > old.hidden_size


def _silence(weights: Weights, old: ModelShape, new: ModelShape) -> None:
    """Gives new tokens logits that sampling never draws, in place.

    The first new channel carries a number too small to change a norm, always the same
    sign. The last norms enlarge it, and of the head's rows only those of new tokens
    read it. The MTP layer has it from the embedding, which it masks at position 0: what
    is drafted of a prompt of one token is the exception.

    Args:
        weights: Of the grown model.
        old: Shape before.
        new: Shape now, of a larger hidden size.
    """
    channel = old.hidden_size
    gains = {"model.norm.weight": _TRUNK_GAIN, "final_layernorm.weight": _MTP_GAIN}
    gains["token_layernorm.weight"] = 1.0
    scale = math.sqrt(old.hidden_size / new.hidden_size)
    for name, weight in weights.items():
        if name.endswith("norm.weight"):
            gain = next((gains[n] for n in gains if name.endswith(n)), 0.0)
            weight[channel] = gain * scale
        elif name.endswith("embed_tokens.weight"):
            weight[:, channel] = _TRACE
        elif name.endswith("input_proj.weight"):
            weight[:, new.hidden_size + channel] = 0
            weight[channel, new.hidden_size + channel] = 1
        elif name.endswith("lm_head.weight"):
            weight[: old.vocab_size, channel] = 0
            weight[old.vocab_size :, channel] = _AGAINST


def expand_weights(
    weights: Weights, old: ModelShape, new: ModelShape, *, seed: int = 0
) -> Weights:
    """Grows float32 weights from one shape to another, function unchanged.

    Args:
        weights: A checkpoint's tensors by name.
        old: Its shape.
        new: The shape to reach, from `Expansion.apply_to`.
        seed: For the numbers that fill what is dead.

    Returns:
        The tensors of the bigger checkpoint.

    Raises:
        ValueError: If the weights are not those of `old`.
    """
    found = {int(hit[1]) for name in weights if (hit := _LAYER.match(name))}
    if found != set(range(old.num_hidden_layers)):
        raise ValueError(
            f"num_hidden_layers: {old.num_hidden_layers} in config.json, but the "
            f"weights hold layers {sorted(found)}"
        )
    filler = _Filler(seed)
    grown = {
        name: _grow(name, weight, old, new, filler) for name, weight in weights.items()
    }
    grown |= _new_layers(grown, old.num_hidden_layers, new.num_hidden_layers, filler)
    if silences(old, new):
        _silence(grown, old, new)
    return grown


def shuffle_mtp(weights: Weights, *, seed: int = 0) -> Weights:
    """The same numbers in random places of each of the MTP layer's weights.

    As if they were lost on the way: the target is as it was, and next to none of its
    tokens is guessed.

    Args:
        weights: Of a whole model.
        seed: Of the places.
    """
    generator = torch.Generator().manual_seed(seed)

    def shuffled(weight: torch.Tensor) -> torch.Tensor:
        places = torch.randperm(weight.numel(), generator=generator)
        return weight.flatten()[places].view_as(weight)

    return {
        name: shuffled(weight) if name.startswith(MTP_PREFIX) else weight
        for name, weight in weights.items()
    }
