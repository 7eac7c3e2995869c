"""Updates of MTP layers, batch by batch."""

from typing import Any

import torch
from torch import distributed

from vllm_mtp.tune.plan import TuningPlan
from vllm_mtp.tune.unroll import (
    Batch,
    Drafter,
    DraftLosses,
    Target,
    draft_losses,
    step_weights,
)

_BETAS = (0.9, 0.95)
_MEMORY = 0.98
"""Of the mean acceptance of a draft step, from update to update."""


class Updates:
    """AdamW on the losses of drafts, and what it remembers."""

    def __init__(self, drafter: Drafter, target: Target, plan: TuningPlan) -> None:
        """
        Args:
            drafter: On its device, in float32, on several ranks already sharded.
            target: On the same device; may be replaced by one of another draft
                vocabulary.
            plan: Loss, steps and optimizer are taken from it.
        """
        self.drafter, self.target, self.plan = drafter, target, plan
        self.device = target.embedding.device
        self.weights = step_weights(plan.num_steps, plan.step_decay).to(self.device)
        self.mean_acceptance = torch.zeros(plan.num_steps, device=self.device)
        matrices = [p for p in drafter.parameters() if p.dim() > 1]
        vectors = [p for p in drafter.parameters() if p.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": plan.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=plan.learning_rate,
            betas=_BETAS,
        )

    def run(self, batch: Batch, rate_share: float, number: int) -> float:
        """One update.

        Args:
            batch: On any device.
            rate_share: Of the plan's learning rate.
            number: Of updates before it.

        Returns:
            The loss; where the gradient is not finite, weights stay as they are.
        """
        found = self.backward(self.place(batch))
        if self.step(rate_share):
            self.remember(found.found, number)
        return found.total.item()

    def place(self, batch: Batch) -> Batch:
        """The batch on the device, its hidden states of the target's dtype."""
        batch = Batch(*(tensor.to(self.device) for tensor in batch))
        return batch._replace(hidden=batch.hidden.to(self.target.embedding.dtype))

    def backward(self, batch: Batch) -> DraftLosses:
        """Add the gradients of a batch that is in its place."""
        with autocast(self.device):
            found = draft_losses(
                self.drafter,
                self.target,
                batch,
                self.plan.loss,
                self.weights,
                self.mean_acceptance,
            )
        found.total.backward()  # type: ignore[no-untyped-call]
        return found

    def step(self, rate_share: float) -> bool:
        """Change the weights, unless a gradient is not finite; whether they were."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.learning_rate * rate_share
        norm = torch.nn.utils.clip_grad_norm_(
            self.drafter.parameters(), self.plan.max_grad_norm
        )
        is_finite = bool(torch.isfinite(norm))
        if is_finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return is_finite

    def remember(
        self,
        # [num_steps, 3, drafts]
        found: torch.Tensor,
        number: int,
    ) -> None:
        """Ranks must weigh KL alike, so they share what they have seen."""
        acceptance = found[:, 1]
        count = acceptance.new_tensor([acceptance.shape[1]])
        seen = torch.cat([acceptance.sum(-1), count])
        if distributed.is_initialized():
            distributed.all_reduce(seen)
        if seen[-1] > 0:
            memory = min(_MEMORY, 1 - 1 / (number + 1))
            self.mean_acceptance.mul_(memory).add_(
                seen[:-1] / seen[-1], alpha=1 - memory
            )


@torch.no_grad()
def measure_drafts(
    drafter: Drafter, target: Target, batch: Batch, num_steps: int
) -> DraftLosses:
    """What drafts of a batch that is in its place are worth, without gradients."""
    device = target.embedding.device
    ones = torch.ones(num_steps, device=device)
    with autocast(device):
        return draft_losses(drafter, target, batch, "kl", ones, ones)


def autocast(device: torch.device) -> Any:
    """Arithmetic in bfloat16; weights stay in float32, and on a CPU all of it does."""
    is_cpu = device.type == "cpu"
    return torch.autocast(device.type, torch.bfloat16, enabled=not is_cpu)
