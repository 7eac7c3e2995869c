"""Model Runner V1: draft probabilities of copied tokens.

A copied token was proposed for sure, and the draft vocabulary need not have it. So its
row is only marked on the way to verification, which spreads rows over all tokens.
"""

from typing import Self

import torch

COPIED = -1.0
"""In the first column of draft probabilities: the row is of a copied token."""


class CopiedRows:
    """Of a step that verifies."""

    def __init__(
        self,
        # [num_draft_tokens]
        draft_token_ids: torch.Tensor,
        # [num_draft_tokens] int64
        rows: torch.Tensor,
    ) -> None:
        self._draft_token_ids = draft_token_ids[rows].long()
        self._rows = rows

    @classmethod
    def taken_from(
        cls,
        # [num_draft_tokens, rows of the draft vocabulary], changed in place
        draft_probs: torch.Tensor | None,
        # [num_draft_tokens]
        draft_token_ids: torch.Tensor,
    ) -> Self | None:
        """Those of a step; their marks are removed. None if there are none."""
        if draft_probs is None:
            return None
        rows = (draft_probs[:, 0] == COPIED).nonzero()[:, 0]
        if not len(rows):
            return None
        draft_probs[rows] = 0.0
        return cls(draft_token_ids, rows)

    def propose_for_sure(
        self,
        # [num_draft_tokens, vocab_size], changed in place
        probs: torch.Tensor,
    ) -> None:
        """Give them the probabilities that they were proposed with."""
        probs[self._rows, self._draft_token_ids] = 1.0

    def without(
        self,
        # [num_draft_tokens] bool, changed in place
        chosen: torch.Tensor,
    ) -> None:
        """Leave them out of chosen rows."""
        chosen[self._rows] = False
