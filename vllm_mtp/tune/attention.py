"""Attention of drafts that begin at every position of a text at once.

As in serving, draft step 1 reads keys that were made of the trunk's hidden states, and
step k reads those and one key for each of the draft's own steps 2 .. k (EAGLE-3 calls
that training-time test, arXiv 2503.01840). Draft *i* of a text begins at position *i*.

transformers lets a model take any attention function by name. It passes keyword
arguments on to it, so the layers themselves stay the family's own.
"""

import math
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface

NAME = "mtp_chain"


class Chain:
    """Keys and values of the draft steps so far."""

    def __init__(self) -> None:
        """No step has been made."""
        self.steps: list[tuple[torch.Tensor, torch.Tensor]] = []
        """``[batch, kv_heads, seq, head_dim]`` each."""


def chain_attention(
    module: torch.nn.Module,
    # [batch, heads, seq, head_dim], rotated
    query: torch.Tensor,
    # [batch, kv_heads, seq, head_dim], rotated
    key: torch.Tensor,
    # [batch, kv_heads, seq, value_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    chain: Chain,
    scaling: float,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """``[batch, seq, heads, value_dim]``, in transformers' order; no weights.

    The step's keys and values join the chain.
    """
    chain.steps.append((key, value))
    if len(chain.steps) == 1:
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
    else:
        attended = _later_step(query * scaling, chain)
    return attended.transpose(1, 2), None


def _later_step(query: torch.Tensor, chain: Chain) -> torch.Tensor:
    (key, value), *own = chain.steps
    num_heads, num_keys = query.shape[1], key.shape[2]
    groups = num_heads // key.shape[1]
    # Query heads that share a key head, one after the other in its row.
    grouped = query.reshape(*key.shape[:2], -1, key.shape[-1])
    scores = (grouped @ key.transpose(-1, -2)).view(*query.shape[:3], num_keys)
    scores = scores + torch.full_like(scores[0, 0], -math.inf).triu(1)
    spread = [[each.repeat_interleave(groups, 1) for each in pair] for pair in own]
    single = [(query * k).sum(-1, keepdim=True) for k, _ in spread]
    weights = torch.cat([scores, *single], -1).float().softmax(-1).to(query.dtype)
    past = weights[..., :num_keys].reshape(*key.shape[:2], -1, num_keys)
    attended = (past @ value).view(*query.shape[:3], value.shape[-1])
    for index, (_, own_value) in enumerate(spread, num_keys):
        attended = attended + weights[..., index, None] * own_value
    return attended


AttentionInterface.register(NAME, chain_attention)
