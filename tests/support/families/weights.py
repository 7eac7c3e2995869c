"""Random weights by name, and the blocks that the families are made of.

Standard deviations are chosen so that a block hands on numbers of the size it gets:
then a hidden state mixes its token's embedding with what attention and the MLP wrote
in a known proportion (``ATTENTION_GAIN``, ``MLP_GAIN``).
"""

import torch

ATTENTION_GAIN = 2.0
"""Size of what attention adds to the hidden state. Large, so that a fault in the KV
cache (a rejected slot that is read, say) changes the greedy output."""

MLP_GAIN = 0.7
"""Size of what an MLP adds. Smaller: it sees the current token only."""

QK_GAIN = 1.5
"""Sharpens attention: at 1 it averages over the context and hardly tells keys apart."""


class WeightDrawer:
    """Draws tensors from one seed and keeps them by their checkpoint names."""

    def __init__(self, seed: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, name: str, num_out: int, num_in: int, gain: float = 1.0) -> None:
        """A linear layer's ``[num_out, num_in]`` weight."""
        self.tensors[name] = self._normal(num_out, num_in) * (gain / num_in**0.5)

    def matrices(
        self, name: str, num: int, num_out: int, num_in: int, gain: float = 1.0
    ) -> None:
        """Experts' linear layers, ``[num, num_out, num_in]``."""
        self.matrix(name, num * num_out, num_in, gain)
        self.tensors[name] = self.tensors[name].view(num, num_out, num_in)

    def convolution(self, name: str, num_channels: int, width: int) -> None:
        """A convolution over time, channel by channel, ``[channels, 1, width]``."""
        self.tensors[name] = self._normal(num_channels, 1, width) / width**0.5

    def vector(self, name: str, *shape: int, mean: float = 0.0) -> None:
        """A bias, or with ``mean=1`` a norm's weight (``mean=0`` for norms that add 1):
        never exactly the mean, so that leaving it out shows."""
        self.tensors[name] = mean + 0.1 * self._normal(*shape)

    def embedding(self, name: str, num_rows: int, width: int) -> torch.Tensor:
        """Rows of unit normal numbers, ``[num_rows, width]``."""
        self.tensors[name] = self._normal(num_rows, width)
        return self.tensors[name]

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator)


def draw_norms(
    weights: WeightDrawer, prefix: str, width: int, *, mean: float = 1.0
) -> None:
    """The two norms of a decoder layer."""
    weights.vector(f"{prefix}.input_layernorm.weight", width, mean=mean)
    weights.vector(f"{prefix}.post_attention_layernorm.weight", width, mean=mean)


def draw_grouped_query_attention(
    weights: WeightDrawer,
    prefix: str,
    *,
    width: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    bias: bool = False,
    qk_norm_mean: float | None = None,
) -> None:
    """Separate q, k, v and o projections, as checkpoints store them.

    Args:
        weights: takes them.
        prefix: of their names.
        width: of the hidden state.
        num_heads: of queries.
        num_kv_heads: of keys and of values.
        head_dim: of each.
        bias: whether q, k and v have one.
        qk_norm_mean: of the norms of each query and key; None if there are none.
    """
    heads = {"q": num_heads, "k": num_kv_heads, "v": num_kv_heads}
    for part, num_part_heads in heads.items():
        name, rows = f"{prefix}.{part}_proj", num_part_heads * head_dim
        weights.matrix(f"{name}.weight", rows, width, 1.0 if part == "v" else QK_GAIN)
        if bias:
            weights.vector(f"{name}.bias", rows)
    columns = num_heads * head_dim
    weights.matrix(f"{prefix}.o_proj.weight", width, columns, ATTENTION_GAIN)
    if qk_norm_mean is not None:
        for norm in ("q_norm", "k_norm"):
            weights.vector(f"{prefix}.{norm}.weight", head_dim, mean=qk_norm_mean)


def draw_mlp(weights: WeightDrawer, prefix: str, width: int, inner: int) -> None:
    """A gated MLP."""
    weights.matrix(f"{prefix}.gate_proj.weight", inner, width)
    weights.matrix(f"{prefix}.up_proj.weight", inner, width)
    weights.matrix(f"{prefix}.down_proj.weight", width, inner, MLP_GAIN)


def draw_experts(
    weights: WeightDrawer,
    prefix: str,
    *,
    width: int,
    inner: int,
    num_experts: int,
    shared: str | None = "shared_experts",
) -> None:
    """A router, routed experts and one shared expert, if there is one."""
    weights.matrix(f"{prefix}.gate.weight", num_experts, width)
    for index in range(num_experts):
        draw_mlp(weights, f"{prefix}.experts.{index}", width, inner)
    if shared is not None:
        draw_mlp(weights, f"{prefix}.{shared}", width, inner)


def draw_combiner(
    weights: WeightDrawer, name: str, width: int, *, embedding_first: bool
) -> None:
    """The matrix that merges embedding and hidden state before an MTP layer.

    The embedding goes through unchanged, see ``random_checkpoints``; the hidden state
    is mixed in at half its size.
    """
    hidden_half = f"{name}.hidden_half"
    weights.matrix(hidden_half, width, width, 0.5)
    halves = [torch.eye(width), weights.tensors.pop(hidden_half)]
    weights.tensors[name] = torch.cat(
        halves if embedding_first else halves[::-1], dim=1
    )
