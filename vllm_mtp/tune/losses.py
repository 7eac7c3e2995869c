"""How far drafts are from the target's distribution.

Of target ``p`` and draft ``q`` over the vocabulary:

- KL: ``sum p (log p - log q)``;
- acceptance: ``sum min(p, q)``, the probability that a token drawn from ``q`` passes
  verification, so 1 - acceptance is the total variation distance;
- LK (arXiv 2602.23881): ``w KL + (1 - w) (1 - acceptance)`` with ``w = exp(-3 a)`` for
  a mean acceptance ``a``. Where next to nothing is accepted the gradient of acceptance
  vanishes and KL leads; where much is, acceptance itself is what counts.

Greedy drafts are accepted where the likeliest tokens are the same: *agreement*.

A head has 16,000 to 150,000 rows, so logits of all steps never exist at once: rows are
taken in chunks, whose gradients are computed in the forward pass.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional as F

Loss = Literal["lk", "kl"]

KL_DECAY = 3.0
"""In the exponent of the weight of KL, as published."""
CHUNK_NUMBERS = {"cpu": 2**19}
"""Logits at a time: what a core's cache holds. Elsewhere `_MANY`."""
_MANY = 2**26


class Head(NamedTuple):
    """The target's, which is not trained."""

    weight: torch.Tensor
    """``[vocab_size, hidden_size]``."""
    drafted: torch.Tensor | None = None
    """``[num_rows]`` int64: the draft vocabulary; None for all tokens."""

    @property
    def rows(self) -> torch.Tensor:
        """``[number of tokens that may be drafted, hidden_size]``."""
        return self.weight if self.drafted is None else self.weight[self.drafted]

    def target(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, number of tokens that may be drafted]`` float32: the target's
        probabilities, which may add up to less than 1."""
        logits = F.linear(hidden.to(self.weight.dtype), self.weight)
        probabilities = logits.float().softmax(-1)
        return probabilities if self.drafted is None else probabilities[:, self.drafted]


class Step(NamedTuple):
    """Rows of one draft step."""

    hidden: torch.Tensor
    """``[rows, hidden_size]``: what the head reads."""
    weights: torch.Tensor
    """``[rows]``: 0 for those that do not count."""
    mean_acceptance: torch.Tensor
    """Scalar: lately."""


class StepLosses(NamedTuple):
    """Of all draft steps."""

    total: torch.Tensor
    """Scalar: what is minimized."""
    found: torch.Tensor
    """``[num_steps, 3, rows]``: KL, acceptance and agreement; 0 in rows that do not
    count."""


def losses(
    loss: Loss, head: Head, teacher: torch.Tensor, steps: Sequence[Step]
) -> StepLosses:
    """Compare the drafts of all steps with the target.

    Args:
        loss: Which.
        head: That target and drafts share.
        teacher: ``[rows, hidden_size]``: what the target's head reads where it predicts
            what row i of each step predicts.
        steps: Rows of each.
    """
    weights = torch.stack([step.weights for step in steps])
    rows = weights.any(dim=0).nonzero()[:, 0]
    total, found = _Losses.apply(  # type: ignore[no-untyped-call]
        loss,
        head,
        teacher[rows],
        weights[:, rows],
        torch.stack([step.mean_acceptance for step in steps]),
        torch.stack([step.hidden[rows] for step in steps]),
    )
    whole = found.new_zeros(*found.shape[:2], len(teacher))
    whole[:, :, rows] = found
    return StepLosses(total, whole)


class _Losses(torch.autograd.Function):
    """Chunk by chunk; the gradient is known when the loss is."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Loss,
        head: Head,
        teacher: torch.Tensor,
        weights: torch.Tensor,
        means: torch.Tensor,
        hidden: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gradient = torch.zeros_like(hidden)
        total = torch.zeros((), device=hidden.device)
        seen = torch.zeros(len(hidden), 3, len(teacher), device=hidden.device)
        # The weight of KL; that of acceptance is the rest.
        shares = (
            torch.exp(-KL_DECAY * means) if loss == "lk" else torch.ones_like(means)
        )
        matrix = head.rows
        num_rows = CHUNK_NUMBERS.get(hidden.device.type, _MANY) // len(head.weight)
        for start in range(0, len(teacher), max(1, num_rows)):
            part = slice(start, start + max(1, num_rows))
            target = _Target(head, teacher[part])
            for step, share in enumerate(shares):
                counts = weights[step, part]
                logits = F.linear(hidden[step, part].to(matrix.dtype), matrix).float()
                found, slopes = _compare(target, logits, share)
                gradient[step, part] = (slopes * counts[:, None]).to(
                    matrix.dtype
                ) @ matrix
                kl, acceptance, _ = found
                total += ((share * kl + (1 - share) * (1 - acceptance)) * counts).sum()
                seen[step, :, part] = found * (counts > 0)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(seen)
        return total, seen

    @staticmethod
    def backward(ctx: Any, total: torch.Tensor, seen: torch.Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return None, None, None, None, None, gradient * total


class _Target:
    """Of a chunk's rows: the target's probabilities of tokens that may be drafted."""

    def __init__(self, head: Head, hidden: torch.Tensor) -> None:
        self.probabilities = head.target(hidden)
        # In a draft vocabulary less than 1.
        self.sums = self.probabilities.sum(-1)
        self.entropy = -torch.xlogy(self.probabilities, self.probabilities).sum(-1)
        self.likeliest = self.probabilities.argmax(-1)


def _compare(
    target: _Target,
    # [rows, vocab] float32, overwritten
    logits: torch.Tensor,
    # Scalar
    share: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distances and slopes.

    Returns:
        ``[3, rows]``: KL, acceptance, and 1 where the likeliest tokens are the same.
        ``[rows, vocab]``: the gradient of ``share KL + (1 - share) (1 - acceptance)``
        in the logits.
    """
    p, total = target.probabilities, target.sums
    cross = torch.linalg.vecdot(p, logits)
    agreement = (logits.argmax(-1) == target.likeliest).float()
    log_sum = logits.logsumexp(-1)
    kl = log_sum * total - cross - target.entropy
    q = logits.sub_(log_sum[:, None]).exp_()
    acceptance = torch.minimum(p, q).sum(-1)
    slopes = share * (q * total[:, None] - p)
    if share < 1:
        # Acceptance grows with q where q is the smaller one.
        below = torch.where(q < p, q, 0)
        below.addcmul_(q, below.sum(-1, keepdim=True), value=-1)
        slopes.sub_(below.mul_(1 - share))
    return torch.stack([kl, acceptance, agreement]), slopes
