"""How far drafts are from the target's distribution.

Of target ``p`` and draft ``q`` over the vocabulary:

- KL: ``sum p (log p - log q)``;
- acceptance: ``sum min(p, q)``, the probability that a token drawn from ``q`` passes
  verification, so 1 - acceptance is the total variation distance;
- LK (arXiv 2602.23881): ``w KL + (1 - w) (1 - acceptance)`` with ``w = exp(-3 a)`` for
  a mean acceptance ``a``. Where next to nothing is accepted the gradient of acceptance
  vanishes and KL leads; where much is, acceptance itself is what counts.

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
CHUNK_ROWS = 256


class Distances(NamedTuple):
    """``[rows]`` float32 each."""

    kl: torch.Tensor
    acceptance: torch.Tensor
    agreement: torch.Tensor
    """1 where the likeliest tokens are the same: a greedy draft token is accepted."""


class Head(NamedTuple):
    """The target's, which is not trained."""

    weight: torch.Tensor
    """``[vocab_size, hidden_size]``."""
    drafted: torch.Tensor | None = None
    """``[num_rows]`` int64: the draft vocabulary; None for all tokens."""

    def draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, number of tokens that may be drafted]`` float32."""
        weight = self.weight if self.drafted is None else self.weight[self.drafted]
        return F.linear(hidden, weight.to(hidden.dtype)).float()

    def target(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same of the target's probabilities, which may add up to less than 1."""
        weight = self.weight.to(hidden.dtype)
        probabilities = F.linear(hidden, weight).float().softmax(-1)
        return probabilities if self.drafted is None else probabilities[:, self.drafted]


def distances(
    # [rows, vocab] float32
    target: torch.Tensor,
    # [rows, vocab] float32
    draft_logits: torch.Tensor,
) -> Distances:
    """Of each row, all differentiable in the logits but the agreement."""
    log_draft = draft_logits.log_softmax(-1)
    kl = (torch.xlogy(target, target) - target * log_draft).sum(-1)
    acceptance = torch.minimum(target, log_draft.exp()).sum(-1)
    agreement = (target.argmax(-1) == draft_logits.argmax(-1)).float()
    return Distances(kl, acceptance, agreement)


def blend(loss: Loss, found: Distances, mean_acceptance: torch.Tensor) -> torch.Tensor:
    """``[rows]``: what is minimized.

    Args:
        loss: Which.
        found: Of these rows.
        mean_acceptance: Scalar, of this draft step; a constant to the gradient.
    """
    if loss == "kl":
        return found.kl
    weight = torch.exp(-KL_DECAY * mean_acceptance)
    return weight * found.kl + (1 - weight) * (1 - found.acceptance)


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
    sums: torch.Tensor
    """``[num_steps, 3]``: of `Distances`, over rows that count."""


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
    return StepLosses(
        *_Losses.apply(  # type: ignore[no-untyped-call]
            loss,
            head,
            teacher[rows],
            weights[:, rows],
            torch.stack([step.mean_acceptance for step in steps]),
            torch.stack([step.hidden[rows] for step in steps]),
        )
    )


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
        sums = torch.zeros(len(hidden), 3, device=hidden.device)
        for start in range(0, len(teacher), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            target = head.target(teacher[rows])
            for step, mean in enumerate(means):
                part = hidden[step, rows].detach().requires_grad_()
                with torch.enable_grad():
                    found = distances(target, head.draft_logits(part))
                    value = (blend(loss, found, mean) * weights[step, rows]).sum()
                    (gradient[step, rows],) = torch.autograd.grad(value, part)
                total += value.detach()
                counts = (weights[step, rows] > 0).float()
                sums[step] += torch.stack([(each * counts).sum() for each in found])
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(sums)
        return total, sums

    @staticmethod
    def backward(ctx: Any, total: torch.Tensor, sums: torch.Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return None, None, None, None, None, gradient * total
