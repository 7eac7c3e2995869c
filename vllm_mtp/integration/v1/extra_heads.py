"""Model Runner V1: drafts of extra heads, all of them from one pass."""

from typing import Any

import torch
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

HEADS_ATTRIBUTES = ("parallel_drafting",)


class DraftsInOnePass(SpecDecodeBaseProposer):
    """Mixin of drafters, in front of those that choose draft tokens.

    To them each head is a draft step: what a request forbids, its grammar and the stop
    rule follow the draft from token to token.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # After vLLM has made its buffers, which need no rows of draft tokens here. All
        # that is left of it: there are no draft steps after the first pass.
        self.parallel_drafting = True

    def model_returns_tuple(self) -> bool:
        return True

    def _sample_draft_tokens(
        self,
        # [num_reqs, num_heads, hidden_size]
        hidden_states: torch.Tensor,
        sampling_metadata: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[num_reqs, K]`` int64 and, of drawn ones, ``[num_reqs, K, columns]``."""
        sample = super()._sample_draft_tokens
        heads = hidden_states.unbind(dim=1)[: self.num_speculative_tokens]
        drafts = [sample(each, sampling_metadata) for each in heads]
        probs = [proposal for _, proposal in drafts if proposal is not None]
        return (
            torch.stack([token_ids for token_ids, _ in drafts], dim=1),
            torch.stack(probs, dim=1) if probs else None,
        )
