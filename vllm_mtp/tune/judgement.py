"""Is one head better than another on these texts?

Both draft from every position of the same texts, so what texts are like does not
matter, only which head drafts better: a pair of acceptance lengths for each text.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from vllm_mtp.tune.unroll import Batch, Drafter, Target
from vllm_mtp.tune.updates import measure_drafts

CERTAIN = 3.0
"""Standard errors. It is asked again and again: 1 of 700 such tests errs."""
MIN_TEXTS = 32
"""Fewer do not tell the error of their mean."""
WORTH_IT = 0.01
"""New weights make a server forget what it has learned of acceptance."""


def lengths_by_text(
    drafter: Drafter, target: Target, batches: Iterable[Batch], num_steps: int
) -> torch.Tensor:
    """``[num_texts]``: mean acceptance length at temperature 1, drafts of `num_steps`.

    Args:
        drafter: The head.
        target: Of the model.
        batches: In their place (`Updates.place`); each row is a text.
        num_steps: Draft tokens.
    """
    found = []
    for batch in batches:
        made = measure_drafts(drafter, target, batch, num_steps)
        lengths = 1 + made.found[:, 1].cumprod(0).sum(0)
        sums = torch.zeros(len(batch.lengths), device=lengths.device)
        numbers = torch.zeros_like(sums)
        sums.index_add_(0, made.texts, lengths)
        numbers.index_add_(0, made.texts, torch.ones_like(lengths))
        found.append((sums / numbers)[numbers > 0].cpu())
    return torch.cat(found) if found else torch.zeros(0)


class Gain(NamedTuple):
    """Of one head over another, in tokens of acceptance length."""

    mean: float
    error: float
    """Standard error of the mean."""
    num_texts: int
    before: float
    """Acceptance length of the other."""

    @property
    def is_certain(self) -> bool:
        """False, too, where a number is not one."""
        return (
            self.num_texts >= MIN_TEXTS
            and self.mean > CERTAIN * self.error
            and self.mean > WORTH_IT * self.before
        )


def gain(
    # [num_texts] each
    before: torch.Tensor,
    after: torch.Tensor,
) -> Gain:
    """Of a head over another on the same texts."""
    differences = after - before
    num_texts = len(differences)
    if num_texts < 2:
        return Gain(0.0, math.inf, num_texts, float(before.sum()))
    error = differences.std() / math.sqrt(num_texts)
    return Gain(
        float(differences.mean()), float(error), num_texts, float(before.mean())
    )
