"""Model Runner V2: what drafts of sampled requests are drawn from, kept until verified.

vLLM keeps a row of the whole vocabulary for each draft token of each request that could
run: 2.5 GB for 1024 requests, K = 8 and 152k tokens in bfloat16. Here a row has a
column for each row of the draft vocabulary, 0.27 GB. vLLM's kernels test drafts against
rows of the whole vocabulary, so a step that verifies spreads out the rows it reads; at
draft steps, of which there are more, nothing is as wide.

A column means another token once rows of the draft vocabulary have moved. They move
between verification and drafting, so only a request that is not in that very step still
has drafts of the old ones: those are rejected unseen.

Draft tokens that were copied behind drawn ones (`context_copies`) need no column: they
were certain.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_mtp.drafting.vocabulary import DraftVocabulary
from vllm_mtp.kernels.truncation import truncate


class DrawnDrafts(NamedTuple):
    """How many tokens of each request's last draft were not copied."""

    # [max_num_reqs] int32 each
    on_host: np.ndarray
    on_device: torch.Tensor

    def num_copied(self, batch: Any) -> np.ndarray | None:
        """``[num_reqs]`` int32: draft tokens of a step that were; None if none was.

        Args:
            batch: vLLM's ``InputBatch``.
        """
        scheduled = batch.num_draft_tokens_per_req
        if scheduled is None:
            return None
        copied: np.ndarray = scheduled - self.on_host[batch.idx_mapping_np]
        return copied.clip(min=0) if (copied > 0).any() else None


class Proposals:
    """Of all requests that could run, by their index in vLLM's ``RequestState``."""

    drawn: DrawnDrafts | None = None
    """Where draft tokens may be copies."""

    def __init__(
        self,
        shape: tuple[int, int],
        vocab_size: int,
        vocabulary: DraftVocabulary | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Take the memory.

        Args:
            shape: Requests that could run, and K_max.
            vocab_size: Of the target.
            vocabulary: What columns stand for; None for the whole vocabulary.
            dtype: Of draft logits.
            device: The worker's.
        """
        num_columns = vocab_size if vocabulary is None else vocabulary.num_rows
        self.logits = torch.zeros(*shape, num_columns, dtype=dtype, device=device)
        """``[max_num_reqs, K_max, num_columns]``, before temperature."""
        self._vocabulary = vocabulary
        self._is_current = np.ones(shape[0], dtype=bool)
        """Whether columns are those that a request's drafts were drawn from."""
        if vocabulary is not None:
            vocabulary.on_rows_changed.append(lambda *_: self._is_current.fill(False))
        # At fixed addresses, for CUDA graphs; vLLM's take turns.
        self._top_k = torch.zeros(shape[0], dtype=torch.int32, device=device)
        self._top_p = torch.zeros(shape[0], device=device)
        self._min_p = torch.zeros(shape[0], device=device)
        self._truncates = True
        self._truncate_none()

    def begin_pass(self, states: Any, requests: np.ndarray) -> None:
        """A draft pass is about to run.

        Args:
            states: vLLM's ``SamplingStates``.
            requests: ``[num_reqs]`` integers.
        """
        self._is_current[requests] = True
        if (
            (states.top_k.np[requests] != states.vocab_size).any()
            or (states.top_p.np[requests] != 1.0).any()
            or (states.min_p.np[requests] != 0.0).any()
        ):
            self._truncates = True
            self._top_k.copy_(states.top_k.gpu, non_blocking=True)
            self._top_p.copy_(states.top_p.gpu, non_blocking=True)
            self._min_p.copy_(states.min_p.gpu, non_blocking=True)
        else:
            self._truncate_none()

    def _truncate_none(self) -> None:
        if self._truncates:
            self._truncates = False
            self._top_k.fill_(torch.iinfo(torch.int32).max)
            self._top_p.fill_(1.0)
            self._min_p.fill_(0.0)

    def truncate(
        self,
        # [num_rows, num_columns], mutated
        logits: torch.Tensor,
        # [num_rows] int64
        idx_mapping: torch.Tensor,
        # [max_num_reqs]
        temperature: torch.Tensor,
    ) -> None:
        """In a draft pass: leave out what the target will not sample."""
        truncate(
            logits, idx_mapping, temperature, self._top_k, self._top_p, self._min_p
        )

    def propose_first(self, batch: Any) -> Any:
        """Let requests' drafts be the first column for sure.

        Args:
            batch: vLLM's ``InputBatch``.

        Returns:
            Its token id: a number or a tensor of one.
        """
        self._is_current[batch.idx_mapping_np] = True
        self.logits[batch.idx_mapping] = -torch.inf
        self.logits[batch.idx_mapping, :, 0] = 0.0
        return 0 if self._vocabulary is None else self._vocabulary.token_ids[0]

    def of_rows(
        self,
        # [num_rows] each
        idx_mapping: torch.Tensor,
        steps: torch.Tensor,
    ) -> torch.Tensor:
        """``[num_rows, vocab_size]``: logits of the draft tokens after rows.

        Args:
            idx_mapping: Request of each row.
            steps: Draft tokens before each row; of K_max there is none after it, and
                anything is returned.
        """
        rows = self.logits[idx_mapping, steps.clamp(max=self.logits.shape[1] - 1)]
        if self._vocabulary is None:
            return rows
        return self._vocabulary.spread(rows, -torch.inf)

    def verifies_copies(self, batch: Any) -> bool:
        """Whether draft tokens of a step were copied.

        Args:
            batch: vLLM's ``InputBatch``.
        """
        return self.drawn is not None and self.drawn.num_copied(batch) is not None

    def put_copies(
        self,
        # [num_rows, vocab_size], mutated
        proposals: torch.Tensor,
        # [num_rows] each
        idx_mapping: torch.Tensor,
        steps: torch.Tensor,
        draft_token_ids: torch.Tensor,
    ) -> None:
        """Let proposals of copied draft tokens be those tokens for sure.

        Args:
            proposals: As `of_rows` returns them.
            idx_mapping: Request of each row.
            steps: Draft tokens before each row. Behind a request's last one anything
                may be proposed.
            draft_token_ids: Of each row; the row before proposes it. -1 for one that
                is rejected unseen.
        """
        assert self.drawn is not None
        is_copy = (steps >= self.drawn.on_device[idx_mapping])[:, None]
        tokens = draft_token_ids.roll(-1).clamp(min=0).long()[:, None]
        certain = proposals.gather(1, tokens).masked_fill_(is_copy, 0.0)
        proposals.masked_fill_(is_copy, -torch.inf).scatter_(1, tokens, certain)

    def outdated_rows(self, batch: Any) -> torch.Tensor | None:
        """``[num_rows]`` bool: whose draft tokens cannot be tested; None if all can.

        Copies could be, but stand behind drawn ones that cannot.

        Args:
            batch: vLLM's ``InputBatch``.
        """
        is_current = self._is_current[batch.idx_mapping_np]
        if is_current.all():
            return None
        device = batch.expanded_idx_mapping.device
        of_request = async_tensor_h2d(~self._is_current, device=device)
        return of_request[batch.expanded_idx_mapping] & (batch.expanded_local_pos > 0)
