"""Model Runner V2: no MTP forward while drafting is off, one catch-up when it resumes.

The catch-up fills the speculator's own input buffers and runs its model, without the
head and without touching what the step's own draft pass has been given.
"""

from typing import Any

import torch
from vllm.v1.worker.gpu.attn_utils import (
    build_attn_metadata,
    build_slot_mappings_by_layer,
)
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_mtp.control.catching_up import caught_up_now
from vllm_mtp.drafting.unseen_tokens import CatchUpPass, UnseenTokens
from vllm_mtp.integration import pause

PAUSE_ATTRIBUTES = ("draft_tokens", "hidden_states", "input_buffers", "max_num_tokens")


class RestsWhileOff(DraftModelSpeculator):
    """Mixin of speculators."""

    can_rest = True
    _rests_while_off = False
    unseen: UnseenTokens | None = None
    """None as well for speculators that read the target's KV."""
    model_runner: Any

    def prepare_to_rest(self) -> None:
        """Take the memory for rows that wait, where resting is allowed."""
        if not self.can_rest or not pause.may_rest(self.vllm_config):
            return
        self._rests_while_off = True
        if self.advance_draft_positions:
            self.unseen = pause.unseen_tokens_like(
                self.hidden_states, self.max_num_reqs
            )

    def propose(
        self,
        input_batch: Any,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        # [num_tokens, hidden_size]
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        # [num_reqs]
        num_sampled: torch.Tensor,
        # [num_reqs]
        num_rejected: torch.Tensor,
        # [max_num_reqs, 1]
        last_sampled: torch.Tensor,
        # [num_prefill_lookahead, max_num_reqs]
        next_prefill_tokens: torch.Tensor,
        *args: Any,
        num_speculative_tokens: int | None = None,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        batch = input_batch
        depth = self.num_speculative_steps
        if num_speculative_tokens is not None:
            depth = num_speculative_tokens
        may_rest = self._rests_while_off and not dummy_run
        if may_rest and pause.mtp_layers_rest(
            depth, batch.num_reqs, batch.num_tokens, batch.num_draft_tokens
        ):
            states = batch.idx_mapping[: batch.num_reqs]
            next_token_ids = torch.where(
                num_sampled[: batch.num_reqs] > 0,
                last_sampled.flatten()[states],
                next_prefill_tokens[0][states],
            )
            self._put_aside(batch, last_hidden_states, next_token_ids)
            self.draft_tokens[: batch.num_reqs].fill_(-1)
            return self.draft_tokens[: batch.num_reqs]
        if may_rest and depth and self.unseen is not None and self.unseen.num_rows:
            waiting = self.unseen.counts(batch.req_ids)
            self._catch_up(batch, caught_up_now(waiting))
        return super().propose(
            batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            num_sampled,
            num_rejected,
            last_sampled,
            next_prefill_tokens,
            *args,
            num_speculative_tokens=num_speculative_tokens,
            dummy_run=dummy_run,
            **kwargs,
        )

    def _put_aside(
        self,
        batch: Any,
        # [num_tokens, hidden_size]
        hidden_states: torch.Tensor,
        # [num_reqs]
        next_token_ids: torch.Tensor,
    ) -> None:
        if self.unseen is None:
            return
        num_reqs = batch.num_reqs
        self.unseen.make_room(
            num_reqs,
            self.model_runner.req_states.req_id_to_index.keys(),
            lambda: self._catch_up(batch, None),
        )
        self.unseen.add(
            batch.req_ids,
            batch.positions[:num_reqs],
            next_token_ids,
            hidden_states[:num_reqs],
        )

    def _catch_up(self, batch: Any, request_ids: list[str] | None) -> None:
        """Run the MTP layers over the rows of some requests of the batch, or of all."""
        assert self.unseen is not None
        rows = self.unseen.take(batch.req_ids, request_ids)
        if rows is None:
            return
        for part in rows.passes(self.max_num_tokens):
            self._run_pass(part, batch)

    def _run_pass(self, part: CatchUpPass, batch: Any) -> None:
        num_rows = part.num_rows
        requests_cpu = torch.from_numpy(part.requests)
        requests = requests_cpu.to(self.device)
        starts_cpu = torch.from_numpy(part.query_start_loc)
        starts = starts_cpu.to(self.device)
        groups = self.block_tables.num_kv_cache_groups
        # Slots and block tables of its own: the step's are in use.
        slots = self.block_tables.compute_slot_mappings(
            batch.idx_mapping[requests],
            starts,
            part.positions,
            num_rows,
            out=torch.empty(groups, num_rows, dtype=torch.int64, device=self.device),
        )
        lengths = part.positions[part.last_rows()] + 1
        metadata = build_attn_metadata(
            attn_groups=self.attn_groups,
            num_reqs=len(part.requests),
            num_tokens=num_rows,
            query_start_loc_gpu=starts,
            query_start_loc_cpu=starts_cpu,
            max_query_len=part.max_query_len,
            seq_lens=lengths.to(torch.int32),
            max_seq_len=self.max_model_len,
            block_tables=[
                table[requests] for table in self.block_tables.input_block_tables
            ],
            slot_mappings=slots,
            kv_cache_config=self.kv_cache_config,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound[requests_cpu],
            positions=part.positions,
        )
        self.input_buffers.input_ids[:num_rows] = part.next_token_ids
        self.input_buffers.positions[:num_rows] = part.positions
        self.hidden_states[:num_rows] = part.hidden_states
        self.on_prefill_begin(len(part.requests))
        self._run_model(
            num_rows,
            metadata,
            build_slot_mappings_by_layer(slots, self.kv_cache_config),
            num_tokens_across_dp=None,
        )
