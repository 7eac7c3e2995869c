"""Drafts continued with what followed the same tokens in a request's own text.

A draft's continuation is that of the longest earlier occurrence of the request's last
tokens and the draft itself; of equally long ones the first is taken, as in vLLM's
``ngram_proposer``. Two Triton launches; the host reads nothing.

Texts are read where vLLM keeps them, which is the host's memory: each token once, and
again as often as the tokens before it agree. That is linear in the length of the text.
"""

from typing import NamedTuple

import torch

from vllm_mtp.kernels import triton_kernels

FILLER = 0
"""Token id that stands where a text offers nothing."""
_PLACES_PER_PROGRAM = 1024
_BLOCKS_AT_ONCE = 128


class Texts(NamedTuple):
    """Of a step's requests, the step's tokens included."""

    # [max_num_reqs, max_model_len] int32, any row stride
    token_ids: torch.Tensor
    # [max_num_reqs] int32
    total_len: torch.Tensor
    # [num_reqs] int64: rows of those two
    idx_mapping: torch.Tensor
    # [num_reqs] int32: tokens of the step; 0 while a prompt is read
    num_sampled: torch.Tensor


class MatchLimits(NamedTuple):
    """Tokens that a match must have, and of which longer ones count as no better."""

    beside_draft: int
    with_draft: int
    alone: int
    """The first where there is no draft."""


class ContextCopies:
    """Continues drafts, and keeps what was offered to see what came of it."""

    def __init__(
        self,
        max_num_reqs: int,
        max_drafts: int,
        max_model_len: int,
        limits: MatchLimits,
        device: torch.device,
    ) -> None:
        """Take the memory and compile.

        Args:
            max_num_reqs: Requests that could run.
            max_drafts: Draft tokens of a request, copied ones included.
            max_model_len: Tokens of a text.
            limits: Of matches.
            device: The worker's.
        """
        self._max_model_len, self._limits = max_model_len, limits
        self._tokens = torch.zeros(
            max_num_reqs, max_drafts, dtype=torch.int32, device=device
        )
        self._total_len, self.num_drawn, self._num_offered = torch.zeros(
            3, max_num_reqs, dtype=torch.int32, device=device
        )
        # [max_num_reqs] int32: draft tokens that were not copied, of the last draft.
        self.num_drawn.fill_(max_drafts)
        self._warm_up(device)

    def continue_drafts(
        self,
        texts: Texts,
        # [num_reqs, max_drafts] int64, mutated
        draft_tokens: torch.Tensor,
        num_drafts: int,
        longest_text: int,
    ) -> torch.Tensor:
        """Write what follows drafts behind them, and `FILLER` where nothing does.

        An offer is judged by the tokens that were committed since; the draft it stood
        behind counts as one of its tokens. A slot's next request finds that of the one
        before it, and is judged by it if its text happens to be as long: one wrong
        count, of no other consequence.

        Args:
            texts: Of the step's requests.
            draft_tokens: Of them; rows are contiguous.
            num_drafts: That are there already, of each. Of none a match of the text
                alone has to be longer.
            longest_text: Upper bound of the lengths of texts that samples are drawn
                for; 0 to search none of them.

        Returns:
            ``[3, num_reqs]`` int32: tokens that are offered to each request, that were
            offered before and could be judged, and those of them that were right.
        """
        num_reqs, num_columns = draft_tokens.shape
        assert draft_tokens.stride(1) == 1, draft_tokens.stride()
        # The last place that is followed by anything is in front of the last token.
        num_places = longest_text + num_drafts - 1 if longest_text else 0
        num_blocks = -(-num_places // _PLACES_PER_PROGRAM)
        scores = torch.empty(
            num_reqs, num_blocks, dtype=torch.int64, device=draft_tokens.device
        )
        if num_blocks:
            self._score(texts, draft_tokens, num_drafts, scores)
        counts = self._tokens.new_empty(3, num_reqs)
        triton_kernels.continue_drafts[(num_reqs,)](
            texts.token_ids,
            texts.token_ids.stride(0),
            texts.total_len,
            self._max_model_len,
            texts.idx_mapping,
            texts.num_sampled,
            draft_tokens,
            draft_tokens.stride(0),
            num_drafts,
            num_columns,
            scores,
            num_blocks,
            self._tokens,
            self._total_len,
            self.num_drawn,
            self._num_offered,
            counts,
            num_reqs,
            FILLER=FILLER,
            COLUMNS=1 << (num_columns - 1).bit_length(),
            BLOCKS=_BLOCKS_AT_ONCE,
            num_warps=1,
        )
        return counts

    def _score(
        self,
        texts: Texts,
        draft_tokens: torch.Tensor,
        num_drafts: int,
        # [num_reqs, num_blocks] int64, mutated
        scores: torch.Tensor,
    ) -> None:
        triton_kernels.score_matches[tuple(scores.shape)](
            texts.token_ids,
            texts.token_ids.stride(0),
            texts.total_len,
            texts.idx_mapping,
            texts.num_sampled,
            draft_tokens,
            draft_tokens.stride(0),
            num_drafts,
            scores,
            MIN_MATCH=self._limits.beside_draft if num_drafts else self._limits.alone,
            MAX_MATCH=self._limits.with_draft,
            PLACES=_PLACES_PER_PROGRAM,
        )

    def _warm_up(self, device: torch.device) -> None:
        """Compile before requests come; nobody has sampled anything here."""
        text, length, num_sampled = (
            # Each at an address of its own, which Triton looks at.
            torch.zeros(shape, dtype=torch.int32, device=device)
            for shape in ((1, 2), (1,), (1,))
        )
        request = torch.zeros(1, dtype=torch.int64, device=device)
        texts = Texts(text, length, request, num_sampled)
        drafts = self._tokens.new_zeros(1, self._tokens.shape[1], dtype=torch.int64)
        num_drawn = self.num_drawn.clone()
        for num_drafts in (0, 1):
            self.continue_drafts(texts, drafts, num_drafts, longest_text=2)
        self.num_drawn.copy_(num_drawn)
