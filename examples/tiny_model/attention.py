"""Attention of a Qwen2 layer in plain torch, with the KV cache of drafting.

Source of the arithmetic: vLLM `model_executor/models/qwen2.py`.
"""

import math
from typing import NamedTuple

import torch
from torch import nn

from examples.tiny_model.shape import ModelShape


class QKV(NamedTuple):
    """Rotated queries and keys, and values: `[batch, heads, seq, head_dim]`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def rotate(
    x: torch.Tensor,  # [batch, heads, seq, head_dim]
    positions: torch.Tensor,  # [seq] int64
    rope_theta: float,
) -> torch.Tensor:
    """Rotary position embedding, halves rotated against each other (NeoX)."""
    half = x.shape[-1] // 2
    exponent = torch.arange(half, dtype=torch.float32, device=x.device) / half
    angle = positions.float()[:, None] / rope_theta**exponent
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Attention(nn.Module):
    """Causal grouped-query attention with biases on q, k and v."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, kv_width = shape.hidden_size, shape.kv_width
        self.q_proj = nn.Linear(hidden, hidden)
        self.k_proj = nn.Linear(hidden, kv_width)
        self.v_proj = nn.Linear(hidden, kv_width)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(*x.shape[:2], -1, self.shape.head_dim)
        return heads.transpose(1, 2)

    def project(
        self,
        x: torch.Tensor,  # [batch, seq, hidden]
        positions: torch.Tensor,  # [seq]
    ) -> QKV:
        """Queries, keys and values of `x`, rotated to `positions`."""
        theta = self.shape.rope_theta
        return QKV(
            rotate(self._heads(self.q_proj(x)), positions, theta),
            rotate(self._heads(self.k_proj(x)), positions, theta),
            self._heads(self.v_proj(x)),
        )

    def merge(
        self,
        attended: torch.Tensor,  # [batch, heads, seq, head_dim]
    ) -> torch.Tensor:
        """Joins the heads and applies the output projection."""
        merged: torch.Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return merged

    def causal(self, qkv: QKV) -> torch.Tensor:
        """Attention of every position to itself and the positions before it.

        Written out, because on a CPU the backward pass of PyTorch's fused
        attention takes four times as long as this one at 256 tokens.
        """
        query = qkv.query / math.sqrt(self.shape.head_dim)
        weights = self._scores(query, qkv.key).softmax(-1)
        return self.merge(self._weighted(weights, qkv.value))

    def _scores(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Causal scores `[batch, heads, seq, seq]`; the future is -inf."""
        # Query heads that share a key head, one after the other in its row.
        grouped = query.reshape(*key.shape[:2], -1, key.shape[-1])
        scores = (grouped @ key.transpose(-1, -2)).view(*query.shape[:3], -1)
        return scores + torch.full_like(scores[0, 0], -math.inf).triu(1)

    def _weighted(self, weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Values `[batch, heads, seq, head_dim]`, averaged by `weights`."""
        grouped = weights.reshape(*value.shape[:2], -1, weights.shape[-1])
        return (grouped @ value).view(*weights.shape[:3], -1)

    def chained(
        self,
        query: torch.Tensor,  # [batch, heads, num_chains, head_dim]
        first: QKV,  # keys and values of step 1, [batch, kv_heads, >= num_chains, ..]
        later: list[QKV],  # of steps 2..k, each [batch, kv_heads, num_chains, ..]
    ) -> torch.Tensor:
        """Attention of draft step k > 1, exactly as the KV cache makes it.

        Chain i sees the keys of step 1 at slots <= i, which the trunk's hidden
        states made, and after them one key for each of its own steps 2..k.
        """
        num_chains = query.shape[2]
        groups = self.shape.num_heads // self.shape.num_kv_heads
        query = query / math.sqrt(self.shape.head_dim)
        scores = self._scores(query, first.key[:, :, :num_chains])
        spread = [
            QKV(step.query, *(x.repeat_interleave(groups, 1) for x in step[1:]))
            for step in later
        ]
        own = [(query * step.key).sum(-1, keepdim=True) for step in spread]
        weights = torch.cat([scores, *own], -1).softmax(-1)
        attended = self._weighted(
            weights[..., :num_chains], first.value[:, :, :num_chains]
        )
        for index, step in enumerate(spread):
            attended = attended + weights[..., num_chains + index, None] * step.value
        return self.merge(attended)
