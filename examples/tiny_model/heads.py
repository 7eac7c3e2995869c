"""Independent heads beside a trained trunk: several tokens ahead in one pass.

Gloeckle et al. 2024, "Better & Faster Large Language Models via Multi-token
Prediction": the model without its last layer is the trunk, the last layer is
the head of the next token, and each extra head is one more such layer on the
same hidden state, under the same final norm and unembedding. Head i (from 1)
at position t predicts token t + 1 + i, and is never shown the tokens between.
"""

import copy
from pathlib import Path

import torch
from torch import nn

from examples.tiny_model.checkpoint import load_model, load_weights
from examples.tiny_model.model import MiMoModel

HEADS_PREFIX = "extra_heads."


class HeadsModel(MiMoModel):
    """A trained model that drafts with extra heads, not with its MTP layer."""

    def __init__(self, trained: MiMoModel, num_heads: int) -> None:
        """Heads start as copies of the last layer, the head of the next token.

        Args:
            trained: Its weights are shared, and frozen.
            num_heads: Extra heads.
        """
        super().__init__(trained.shape)
        self.model, self.lm_head = trained.model, trained.lm_head
        self.requires_grad_(False)
        last = self.model.layers[-1]
        self.extra_heads = nn.ModuleList(
            copy.deepcopy(last).requires_grad_() for _ in range(num_heads)
        )

    @property
    def drafter(self) -> nn.Module:
        """What is trained while the trunk is frozen."""
        return self.extra_heads

    def draft_hidden(
        self, token_ids: torch.Tensor, num_steps: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """As `MiMoModel.draft_hidden`; head i's output is step i of a chain."""
        *trunk, last = self.model.layers
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        with torch.no_grad():
            hidden = self.embed(token_ids)
            for layer in trunk:
                hidden = layer(hidden, positions)
            teacher = self.model.norm(last(hidden, positions))
        num_chains = token_ids.shape[1] - num_steps
        return teacher, [
            self.model.norm(head(hidden[:, :num_chains], positions[:num_chains]))
            for head in self.extra_heads[:num_steps]
        ]


def load_heads_model(
    source: Path, num_heads: int, heads_file: Path | None = None
) -> HeadsModel:
    """Reads a trunk, and its extra heads.

    Args:
        source: Checkpoint of `MiMoModel`.
        num_heads: Extra heads.
        heads_file: Their weights; without it they are untrained.

    Raises:
        ValueError: If a file is missing or damaged, or weights do not fit.
    """
    model = HeadsModel(load_model(source), num_heads)
    if heads_file is not None:
        weights = load_weights(heads_file)
        if weights.keys() != head_weights(model).keys():
            raise ValueError(f"checkpoint: {heads_file} is not of {num_heads} heads")
        model.load_state_dict(weights, strict=False)
    return model.eval()


def head_weights(model: HeadsModel) -> dict[str, torch.Tensor]:
    """Weights of the extra heads, ``extra_heads.{i}.*``."""
    weights = model.state_dict().items()
    return {name: each for name, each in weights if name.startswith(HEADS_PREFIX)}
