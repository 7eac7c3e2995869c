"""Drafts from every position of texts, as they are served, and their losses.

Row *i* of draft step *k* (from 1) is fed token *i + k* and predicts token *i + k + 1*,
for which the target's hidden state is that of position *i + k*. Tokens fed are those of
the text: a draft whose token was not the text's has ended there, so later steps count
only where they are the same.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vllm_mtp.tune.attention import Chain
from vllm_mtp.tune.layer import MTPLayer
from vllm_mtp.tune.losses import Head, Loss, Step, losses


class Batch(NamedTuple):
    """Texts, padded at the end."""

    token_ids: torch.Tensor
    """``[batch, seq]`` int64."""
    hidden: torch.Tensor
    """``[batch, seq, hidden_size]``: what the trunk hands to the MTP layers."""
    positions: torch.Tensor
    """``[batch, seq]`` int64."""
    lengths: torch.Tensor
    """``[batch]`` int64."""


class Target(nn.Module):
    """What drafting takes from the target; nothing of it is trained."""

    def __init__(
        self, embedding: torch.Tensor, head: Head, final_norm: nn.Module | None
    ) -> None:
        """
        Args:
            embedding: ``[vocab_size, hidden_size]``.
            head: With the draft vocabulary.
            final_norm: Between the hidden states that the trunk hands over and the
                head; None if they have been through it.
        """
        super().__init__()
        self.embedding = nn.Buffer(embedding, persistent=False)
        self.head = head
        self.final_norm = final_norm
        self.requires_grad_(False)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``[batch, seq, hidden_size]``."""
        return nn.functional.embedding(token_ids, self.embedding)

    def read(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the head reads of the trunk's hidden states."""
        return hidden if self.final_norm is None else self.final_norm(hidden)


class Drafter(nn.Module):
    """One MTP layer, run for each draft step, or several, one for each.

    Each of several runs over all rows of a step, as Model Runner V2 has them run, and a
    row keeps its position; the one layer of a chain moves on by a position a step.
    """

    def __init__(self, layers: list[MTPLayer], checkpoints: bool = False) -> None:
        """
        Args:
            layers: In their order.
            checkpoints: Compute activations again in the backward pass.
        """
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.checkpoints = checkpoints

    def forward(self, target: Target, batch: Batch, num_steps: int) -> torch.Tensor:
        """``[num_steps, batch, seq - num_steps, hidden_size]``: what the head reads."""
        is_chain = len(self.layers) == 1
        assert is_chain or num_steps <= len(self.layers), num_steps
        num_drafts = batch.token_ids.shape[1] - num_steps
        embeddings = target.embed(batch.token_ids)
        chains = [Chain() for _ in self.layers]
        previous = batch.hidden[:, :num_drafts]
        positions = batch.positions[:, :num_drafts]
        outputs = []
        for step in range(num_steps):
            number, moved = (0, step) if is_chain else (step, 0)
            tokens = slice(step + 1, step + 1 + num_drafts)
            given = (previous, embeddings[:, tokens], positions + moved)
            normed, previous = self._run(number, given, chains[number])
            outputs.append(normed)
        return torch.stack(outputs)

    def _run(
        self, number: int, given: tuple[torch.Tensor, ...], chain: Chain
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layers[number]
        if not (self.checkpoints and torch.is_grad_enabled()):
            result: tuple[torch.Tensor, torch.Tensor] = layer(*given, chain)
            return result
        num_before = len(chain.steps)

        def again(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            # The second time, too, the chain is what it was before this step.
            own = Chain()
            own.steps = chain.steps[:num_before]
            outputs: tuple[torch.Tensor, torch.Tensor] = layer(*tensors, own)
            if len(chain.steps) == num_before:
                chain.steps.append(own.steps[-1])
            return outputs

        recomputed: tuple[torch.Tensor, torch.Tensor] = checkpoint(
            again, *given, use_reentrant=False
        )
        return recomputed


def step_weights(num_steps: int, decay: float) -> torch.Tensor:
    """``[num_steps]``, summing to 1: later steps count less, as fewer drafts get there.

    ``decay ** (k - 1)``, from FastMTP (arXiv 2509.18362).
    """
    weights = decay ** torch.arange(num_steps, dtype=torch.float32)
    return weights / weights.sum()


class DraftLosses(NamedTuple):
    """Of all drafts of a batch."""

    total: torch.Tensor
    """Scalar: what is minimized, of each step a mean over drafts."""
    found: torch.Tensor
    """``[num_steps, 3, drafts]``: KL, acceptance and agreement of each draft that
    counts, given that the steps before held."""
    texts: torch.Tensor
    """``[drafts]`` int64: of the batch, whose they are."""


def draft_losses(
    drafter: Drafter,
    target: Target,
    batch: Batch,
    loss: Loss,
    # [num_steps]
    weights: torch.Tensor,
    # [num_steps]
    mean_acceptance: torch.Tensor,
) -> DraftLosses:
    """Compare the drafts of a batch with what the target says."""
    num_steps = len(weights)
    outputs = drafter(target, batch, num_steps)
    num_drafts = outputs.shape[2]
    # The target has a hidden state for the last token that is predicted.
    drafts = torch.arange(num_drafts, device=outputs.device)
    counts = drafts + num_steps < batch.lengths[:, None]
    share = counts.float() / counts.sum().clamp(min=1)
    teacher = target.read(batch.hidden)
    # One row of the teacher for each token that is predicted: step k's row i is i + k.
    width = teacher.shape[1]
    steps = []
    for number, output in enumerate(outputs, 1):
        pad = (number, width - num_drafts - number)
        steps.append(
            Step(
                nn.functional.pad(output, (0, 0, *pad)).flatten(0, 1),
                nn.functional.pad(share * weights[number - 1], pad).flatten(),
                mean_acceptance[number - 1],
            )
        )
    made = losses(loss, target.head, teacher.flatten(0, 1), steps)
    by_row = made.found.view(num_steps, 3, *teacher.shape[:2])
    by_draft = [
        each[:, :, number : number + num_drafts][:, counts]
        for number, each in enumerate(by_row, 1)
    ]
    return DraftLosses(made.total, torch.stack(by_draft), counts.nonzero()[:, 0])
