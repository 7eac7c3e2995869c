"""The acceptance tests, written as the distributions that they are. The specification.

Given a draft, a test decides how many of its tokens are kept and which token follows
them. Both are random; here each test says how likely every outcome is. What is fast
(``block.py``, vLLM's own kernels) is compared with this, and the proof that the output
is the target's enumerates all drafts over a small vocabulary (tests/unit/verification).

Notation, for one request with ``K`` draft tokens:

- ``target[i]`` is the target's distribution after the first ``i`` draft tokens, with
  the request's sampling parameters applied; ``target[K]`` yields the bonus token,
- ``proposal[i]`` is what draft token ``i + 1`` was drawn from; one-hot if it was not
  drawn but chosen. Its entries outside the draft vocabulary are 0.

Sources: ratio test, Leviathan et al., arXiv 2211.17192; block verification, Sun et al.,
arXiv 2403.10444, algorithm 2.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch


class Verified(NamedTuple):
    """What a test makes of one draft."""

    # [K + 1]: probability that exactly 0, 1, .. K draft tokens are kept
    num_accepted: torch.Tensor
    # [K + 1, vocab_size]: distribution of the token that follows so many
    next_token: torch.Tensor


AcceptanceTest = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Verified]


def greedy_test(
    # [K + 1, vocab_size]
    target: torch.Tensor,
    # [K, vocab_size]
    proposal: torch.Tensor,
    # [K] int64
    draft_token_ids: torch.Tensor,
) -> Verified:
    """Keeps draft tokens while they are the target's most likely ones."""
    best = target.argmax(dim=-1)
    kept = (draft_token_ids == best[:-1]).long().cumprod(0).sum()
    num_accepted = torch.zeros(len(target), dtype=target.dtype)
    num_accepted[kept] = 1.0
    next_token = torch.zeros_like(target).scatter_(1, best[:, None], 1.0)
    return Verified(num_accepted, next_token)


def ratio_test(
    # [K + 1, vocab_size]
    target: torch.Tensor,
    # [K, vocab_size]
    proposal: torch.Tensor,
    # [K] int64
    draft_token_ids: torch.Tensor,
) -> Verified:
    """Keeps each draft token with probability ``min(1, target / proposal)``.

    The first that is not kept is replaced by one drawn from what the proposal has too
    little of: ``max(target - proposal, 0)``, normalised.
    """
    accept = _ratios(target, proposal, draft_token_ids).clamp(max=1.0)
    alive = torch.cat([accept.new_ones(1), accept.cumprod(0)])
    stopped = torch.cat([1.0 - accept, accept.new_ones(1)])
    missing = (target[:-1] - proposal).clamp(min=0.0)
    return Verified(alive * stopped, _with_bonus(missing, target))


def block_test(
    # [K + 1, vocab_size]
    target: torch.Tensor,
    # [K, vocab_size]
    proposal: torch.Tensor,
    # [K] int64
    draft_token_ids: torch.Tensor,
) -> Verified:
    """Keeps the longest part of the draft that a joint test lets through.

    A token that is less likely than it should be may be kept for the sake of what
    precedes it: ``weight[i] = min(1, weight[i - 1] * target / proposal)``. On average
    no test keeps more.
    """
    weights = [target.new_ones(())]
    for ratio in _ratios(target, proposal, draft_token_ids):
        weights.append((weights[-1] * ratio).clamp(max=1.0))
    weight = torch.stack(weights)
    missing = (weight[:-1, None] * target[:-1] - proposal).clamp(min=0.0)
    mass = missing.sum(dim=-1)
    # Where nothing is missing and the weight is 1 the next token is kept for sure.
    passes = torch.nan_to_num(mass / (mass + 1.0 - weight[:-1]), nan=1.0)
    passes[:1] = 1.0
    passes = torch.cat([passes, weight[-1:]])
    fails_later = (1.0 - passes[1:]).flip(0).cumprod(0).flip(0)
    num_accepted = passes * torch.cat([fails_later, passes.new_ones(1)])
    return Verified(num_accepted, _with_bonus(missing, target))


def _ratios(
    target: torch.Tensor, proposal: torch.Tensor, draft_token_ids: torch.Tensor
) -> torch.Tensor:
    """``[K]``: target over proposal of each draft token."""
    at = draft_token_ids[:, None]
    wanted = target[:-1].gather(1, at)[:, 0]
    given = proposal.gather(1, at)[:, 0]
    return wanted / given


def _with_bonus(missing: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Rows normalised; where nothing is missing the row is never drawn from."""
    mass = missing.sum(dim=-1, keepdim=True)
    rows = torch.where(mass > 0, missing / mass, target[:-1])
    return torch.cat([rows, target[-1:]])
