"""Model Runner V1: no MTP forward while drafting is off, one catch-up when it resumes.

The catch-up is a first pass (`propose` with no draft tokens: it fills the drafter's KV
and stops there), over the rows that waited.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_mtp.control.catching_up import caught_up_now
from vllm_mtp.drafting.unseen_tokens import Rows, UnseenTokens
from vllm_mtp.integration.v1.first_pass import ShortensFirstPass
from vllm_mtp.integration.worker import drafting_disabled

PAUSE_ATTRIBUTES = ("hidden_states", "max_num_tokens", "uses_mrope")


class RestsWhileOff(ShortensFirstPass):
    """Mixin of drafters."""

    can_rest = True
    rests_while_off = False
    unseen: UnseenTokens | None = None
    """None as well for drafters that read the target's KV: they have none to fill."""
    hears_later = False
    """Tokens of the step that is under way are kept for a later call of `hear`."""
    model_runner: Any

    def hear(
        self,
        request_ids: Sequence[str],
        # [num_reqs, num_tokens], -1 where there is none
        committed: torch.Tensor,
    ) -> None:
        """Steps have committed these tokens; for those who follow them."""

    def prepare_to_rest(self) -> None:
        """Take the memory for rows that wait, where resting is allowed."""
        if (
            not self.can_rest
            or self.uses_mrope
            or not drafting_disabled.may_rest(self.vllm_config)
        ):
            return
        self.rests_while_off = True
        if not self.constant_draft_positions:
            self.unseen = drafting_disabled.unseen_tokens_like(
                self.hidden_states, self.max_batch_size
            )

    def forget_unseen(self, scheduler_output: Any) -> None:
        """Drop rows of requests that are gone or will be computed anew."""
        if self.unseen is None or not self.unseen.num_rows:
            return
        finished = scheduler_output.finished_req_ids
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        if finished or resumed:
            self.unseen.forget({*finished, *resumed})

    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        common_attn_metadata: CommonAttentionMetadata,
        **kwargs: Any,
    ) -> torch.Tensor:
        metadata = common_attn_metadata
        # A request that has drafts has more than one row, so none has any.
        if self.rests_while_off and drafting_disabled.mtp_layers_rest(
            num_speculative_tokens, metadata.num_reqs, metadata.num_actual_tokens, 0
        ):
            self.put_aside(
                target_positions, target_hidden_states, next_token_ids, metadata
            )
            return next_token_ids.new_empty((metadata.num_reqs, 0), dtype=torch.int64)
        if num_speculative_tokens and self.unseen is not None and self.unseen.num_rows:
            waiting = self.unseen.counts(self.model_runner.input_batch.req_ids)
            self._catch_up(metadata, caught_up_now(waiting))
        return super().propose(
            num_speculative_tokens=num_speculative_tokens,
            target_token_ids=target_token_ids,
            target_positions=target_positions,
            target_hidden_states=target_hidden_states,
            next_token_ids=next_token_ids,
            token_indices_to_sample=token_indices_to_sample,
            common_attn_metadata=metadata,
            **kwargs,
        )

    def put_aside(
        self,
        # [num_reqs]
        positions: torch.Tensor,
        # [num_rows >= num_reqs, hidden_size]
        hidden_states: torch.Tensor,
        # [num_reqs]
        next_token_ids: torch.Tensor,
        metadata: CommonAttentionMetadata,
    ) -> None:
        """Keep what the MTP layers would have read in this step."""
        if self.unseen is None:
            return
        num_reqs = metadata.num_reqs
        self.unseen.make_room(
            num_reqs,
            self.model_runner.requests.keys(),
            lambda: self._catch_up(metadata, None),
        )
        self.unseen.add(
            self.model_runner.input_batch.req_ids,
            positions,
            next_token_ids,
            hidden_states[:num_reqs],
        )

    def has_room_for_unseen(self, num_rows: int) -> bool:
        """Whether so many rows can be kept as things are."""
        unseen = self.unseen
        return unseen is None or unseen.num_rows + num_rows <= unseen.max_rows

    def own_rows(
        self,
        # [num_rows >= num_reqs, hidden_size]
        hidden_states: torch.Tensor,
        num_reqs: int,
    ) -> torch.Tensor:
        """``[num_reqs, hidden_size]``: rows over which no later step writes."""
        rows = hidden_states[:num_reqs]
        is_reused = self.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
        # Without a store nobody will read them.
        return rows.clone() if is_reused and self.unseen is not None else rows

    def keep_unseen(
        self,
        request_ids: Sequence[str],
        # [num_reqs] int64
        positions: Rows,
        next_token_ids: Sequence[int],
        # [num_reqs, hidden_size], see `own_rows`
        hidden_states: torch.Tensor,
    ) -> None:
        """As `put_aside`, after a step of one row each; there is room.

        Args:
            request_ids: The batch, in its order.
            positions: Of the rows.
            next_token_ids: What each request has just sampled.
            hidden_states: Of the rows.
        """
        if self.unseen is not None:
            self.unseen.add_step(request_ids, positions, next_token_ids, hidden_states)

    def _catch_up(
        self, metadata: CommonAttentionMetadata, request_ids: list[str] | None
    ) -> None:
        """Run the MTP layers over the rows of some requests of the batch, or of all."""
        assert self.unseen is not None
        rows = self.unseen.take(self.model_runner.input_batch.req_ids, request_ids)
        if rows is None:
            return
        # The rollback has written this step's slots there already.
        slots = self._slot_mapping_buffer[: metadata.num_actual_tokens].clone()
        for part in rows.passes(self.max_num_tokens):
            super().propose(
                num_speculative_tokens=0,
                sampling_metadata=None,
                **self.inputs_of(part, metadata),
            )
        self._slot_mapping_buffer[: slots.shape[0]] = slots
