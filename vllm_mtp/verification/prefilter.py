"""The likeliest token of a head, prefiltered by a copy of the head in 8 bits.

Of a greedy request verification needs only the likeliest token of each row, yet the
head multiplies every row by the whole vocabulary: with 131,072 tokens that is most of
what 32 rows cost a small model on a CPU. A copy of the head in 8 bits takes a sixth of
that, and says of every token what its logit is, give or take a bound. Tokens that
cannot be the likeliest within these bounds, nearly all, are done with; the others are
multiplied by the head as it is.

The bound is no estimate. With a row of the head w = r + e (r quantized, e what that
took off) and a hidden state x = q + d alike, the logit is

    w.x = r.q + e.x + r.d,   where |e.x + r.d| <= |e| |x| + |r| |d|   (Cauchy-Schwarz)

and r.q is what the copy computes, in whole numbers. All four norms are known. Added to
it: what float32 sums are off by at most, in the target's own head and here, what the
copy's logits lose where its kernel rounds them to bfloat16, and what the logits lose
where the target does.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

BLOCK_TOKENS = 128
"""Blocks of the vocabulary are ruled out as a whole: each logit is read once."""

_MAX_BLOCKS = 64
"""In which tokens of a row may be left. A row for which the model has no opinion has
more, and is multiplied by the whole head."""
_MAX_CANDIDATES = 256
"""For each row in the mean."""
_MAX_KEPT_ROWS = 64
"""Of logits that are written into the same memory step after step. Asking for new
memory of this size takes a quarter of the time that the product takes."""
_UNIT_ROUNDOFF = 2.0**-24
_BFLOAT16_MARGIN = 1.25
"""Two logits are rounded by half a unit each; the rest covers the bound's own end."""


class RoundingNorms(NamedTuple):
    """Euclidean norms that bound the errors of a head in 8 bits."""

    # [num_rows] float32: of what rounding took off each row
    errors: torch.Tensor
    # [num_rows] float32: of the quantized rows
    sizes: torch.Tensor


class Candidates(NamedTuple):
    """Tokens that can be the likeliest of their row."""

    # [num_candidates] int64 each, in this order
    rows: torch.Tensor
    token_ids: torch.Tensor
    # [num_candidates] float32: logits of the copy, and what they are off by at most
    approximate: torch.Tensor
    bounds: torch.Tensor
    # [num_others] int64: rows of which too many tokens are left, or none
    others: torch.Tensor


class Int8Prefilter:
    """Finds the likeliest tokens of a head by way of its copy in 8 bits."""

    def __init__(
        self,
        # of [num_tokens, hidden_size] float32, into [num_tokens, num_rows] float32
        multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        norms: RoundingNorms,
        # [num_rows] int64
        token_ids: torch.Tensor,
        # [vocab_size, hidden_size], of the target
        weight: torch.Tensor,
        roundoff: float = 0.0,
    ) -> None:
        """Nothing is copied.

        Args:
            multiply: By the copy; see `row_order`. Returns what rounding took off
                each hidden state, ``[num_tokens]``: the Euclidean norm.
            norms: Of the copy's rows.
            token_ids: Of the copy's rows.
            weight: What decides between the tokens that are left.
            roundoff: By what share of it a product may be off that the copy's kernel
                has quantized.
        """
        self._multiply, self._weight = multiply, weight
        self._token_ids, self._roundoff = token_ids, roundoff
        self._vocab_size, hidden_size = weight.shape
        errors, sizes = norms
        # Of the sums in the target's head and of those here.
        of_sums = 2.0 * (hidden_size + 8) * _UNIT_ROUNDOFF
        errors = errors + of_sums * (errors + sizes)
        self._errors = torch.unflatten(errors, 0, (-1, BLOCK_TOKENS))
        self._sizes = torch.unflatten(sizes, 0, (-1, BLOCK_TOKENS))
        self._block_errors = self._errors.amax(dim=1)
        self._block_sizes = self._sizes.amax(dim=1)
        self._kept = torch.empty(_MAX_KEPT_ROWS, len(norms.errors))
        self.is_stale = False
        """A logit was off by more than it can be: the weights have changed."""

    def logits(
        self,
        # [num_tokens, hidden_size] of the weight's dtype
        hidden_states: torch.Tensor,
        # of [any, hidden_size]: [any, vocab_size]
        whole: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor | None:
        """Logits of the tokens that can be the likeliest, -inf for all others.

        Args:
            hidden_states: Of the tokens before.
            whole: Multiplies by the whole head: for rows of which too many tokens are
                left, or none (they are not finite).

        Returns:
            ``[num_tokens, vocab_size]`` float32, as the target's dtype has them and
            good until the next call; None where prefiltering is no use, most rows being
            such, or where the copy is no longer one of the weights.
        """
        num_tokens = len(hidden_states)
        if num_tokens <= _MAX_KEPT_ROWS:
            logits = self._kept[:num_tokens]
        else:
            logits = self._kept.new_empty(num_tokens, self._kept.shape[1])
        found = self._candidates(hidden_states, logits)
        if found is None:
            return None
        rows, token_ids, approximate, bounds, others = found
        products = hidden_states[rows].float() * self._weight[token_ids].float()
        exact = products.sum(dim=1)
        self.is_stale = bool(((exact - approximate).abs() > bounds).any())
        if self.is_stale:
            return None
        logits = logits[:, : self._vocab_size].fill_(-torch.inf)
        logits[rows, token_ids] = exact.to(hidden_states.dtype).float()
        if len(others):
            logits[others] = whole(hidden_states[others]).float()
        return logits

    def _candidates(
        self,
        # [num_tokens, hidden_size]
        hidden_states: torch.Tensor,
        # [num_tokens, num_rows] float32, which is written
        approximate: torch.Tensor,
    ) -> Candidates | None:
        """All that can be the likeliest; None where they are too many."""
        x = hidden_states.float()
        errors = self._multiply(x, approximate)
        sizes = x.norm(dim=1)
        blocks = torch.unflatten(approximate, 1, (-1, BLOCK_TOKENS))
        highest = blocks.amax(dim=2)
        doubt = torch.outer(sizes, self._block_errors)
        doubt += torch.outer(errors, self._block_sizes)
        if self._roundoff:
            # What a product may be at most rises with it, so the highest one bounds all
            # of its block.
            doubt += self._roundoff * highest.abs()
        upper = highest + doubt
        least = (highest - doubt).amax(dim=1)
        if hidden_states.dtype != torch.float32:
            magnitude = torch.maximum(upper.amax(dim=1).abs(), least.abs())
            rounding = _BFLOAT16_MARGIN * torch.finfo(hidden_states.dtype).eps
            least -= rounding * magnitude
        is_open = upper >= least[:, None]
        num_open = is_open.sum(dim=1)
        is_other = (num_open == 0) | (num_open > _MAX_BLOCKS)
        others = is_other.nonzero()[:, 0]
        if 2 * len(others) > len(x):
            return None
        is_open[others] = False
        rows, block = is_open.nonzero(as_tuple=True)
        values = blocks[rows, block]
        bounds = sizes[rows, None] * self._errors[block]
        bounds += errors[rows, None] * self._sizes[block]
        if self._roundoff:
            bounds += self._roundoff * values.abs()
        is_left = values + bounds >= least[rows, None]
        place, offset = is_left.nonzero(as_tuple=True)
        if len(place) > _MAX_CANDIDATES * len(x):
            return None
        return Candidates(
            rows[place],
            self._token_ids[block[place] * BLOCK_TOKENS + offset],
            values[place, offset],
            bounds[place, offset],
            others,
        )


def row_order(
    # [vocab_size, hidden_size]
    weight: torch.Tensor,
) -> torch.Tensor:
    """Token ids of the rows of a copy, ``[num_rows]`` int64.

    By their norms, so that one bound fits all of a block: of the bundled model's tokens
    some are seven times as long as others, and as they come one in eight hidden states
    had half of the blocks left. The last block is filled with the longest one.
    """
    order = torch.cat([part.float().norm(dim=1) for part in torch.split(weight, 4096)])
    order = order.argsort()
    missing = -len(order) % BLOCK_TOKENS
    return torch.cat([order, order[-1:].expand(missing)])


def rounding_norms(
    # [num_rows, hidden_size]
    weight: torch.Tensor,
    # [num_rows, hidden_size] int8
    quantized: torch.Tensor,
    # [num_rows, 1] float32
    scales: torch.Tensor,
) -> RoundingNorms:
    """Of rows that were quantized."""
    restored = quantized.float() * scales
    errors = (weight.float() - restored).norm(dim=1)
    return RoundingNorms(errors, restored.norm(dim=1))
