"""Model Runner V2: no MTP forward while drafting is disabled, KV backfill after it.

A step without the MTP layers goes like one of a runner without a speculator: what vLLM
does for one that has nothing to do, and what we kept of the step, took as long as
drafting one token on an H100 with 1.65B parameters, whose steps wait for the host. What
is kept now is one copy; the tokens are on the device anyhow.

The backfill fills the speculator's own input buffers and runs its model, without the
head and without touching what the step's own draft pass has been given. It computes
keys and values alone, where that is possible (`draft_model_gate`), as do draft passes
of steps that draft nothing: there vLLM's run the head, too.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.v1.worker.gpu.attn_utils import (
    build_attn_metadata,
    build_slot_mappings_by_layer,
)
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import get_drafter_hidden_states

from vllm_mtp.control.kv_backfill import backfilled_now
from vllm_mtp.drafting.pending_tokens import (
    BackfillPass,
    PendingTokens,
    Rows,
    to_device,
)
from vllm_mtp.integration.worker import drafting_disabled
from vllm_mtp.integration.worker.draft_model_gate import DraftModelGate, gate_of
from vllm_mtp.kernels.row_copies import keep_rows

BACKFILL_ATTRIBUTES = ("hidden_states", "input_buffers", "max_num_tokens")


class BackfillsKV(DraftModelSpeculator):
    """Mixin of speculators."""

    can_disable = True
    _may_disable = False
    """Whether steps without drafts may go without the MTP layers."""
    drafts_nothing = False
    """In the step that is under way."""
    gate: DraftModelGate | None = None
    pending: PendingTokens | None = None
    """None as well for speculators that read the target's KV."""
    model_runner: Any

    def load_model(self, target_model: Any) -> None:
        super().load_model(target_model)
        self.gate = gate_of(self.vllm_config, self.model, self.draft_attn_layer_names)

    def prepare_to_disable(self) -> None:
        """Take the memory for pending tokens, where drafting may be disabled."""
        if not self.can_disable or not drafting_disabled.may_disable(self.vllm_config):
            return
        self._may_disable = True
        if self.advance_draft_positions:
            self.pending = drafting_disabled.pending_tokens_like(
                self.hidden_states, self.max_num_reqs
            )

    def backfill(self, batch: Any) -> None:
        """Before a step drafts: some of its requests' pending tokens are read.

        Args:
            batch: vLLM's ``InputBatch``.
        """
        if self.pending is not None and self.pending.num_rows:
            counts = self.pending.counts(batch.req_ids)
            self._backfill(batch, backfilled_now(counts))

    def _kv_only(self, is_so: bool = True) -> AbstractContextManager[None]:
        return nullcontext() if self.gate is None else self.gate.kv_only(is_so)

    def _prefill(self, *args: Any, **kwargs: Any) -> None:
        with self._kv_only(self.drafts_nothing):
            super()._prefill(*args, **kwargs)

    def skips_mtp_layers(self, state: Any) -> bool:
        """Whether a step goes without the MTP layers.

        Args:
            state: vLLM's ``ExecuteModelState``, of the target's pass that is over.
        """
        batch = state.input_batch
        return self._may_disable and drafting_disabled.skips_mtp_layers(
            state.num_spec_tokens_to_schedule,
            batch.num_reqs,
            batch.num_tokens,
            # As the scheduler knows them, whatever is left out of them on the device.
            0 if batch.num_draft_tokens_per_req is None else batch.num_reqs,
        )

    def keep_pending(self, state: Any) -> None:
        """Keep what the MTP layers would have read in a step without them."""
        if self.pending is None:
            return
        batch, num_reqs = state.input_batch, state.input_batch.num_reqs
        hidden_states = self.target_hidden_states(state)
        self.pending.make_room(
            num_reqs,
            self.model_runner.req_states.req_id_to_index.keys(),
            lambda rows: self._backfill(batch, None, rows),
        )
        rows = self.pending.reserve(batch.req_ids)
        keep_rows(
            hidden_states,
            batch.positions,
            self.pending.hidden_states[rows],
            self.pending.positions[rows],
        )

    def target_hidden_states(self, state: Any) -> torch.Tensor:
        """``[num_tokens, hidden_size]``: of a pass, as drafts read them.

        Args:
            state: vLLM's ``ExecuteModelState``.
        """
        hidden_states: torch.Tensor = get_drafter_hidden_states(
            self.model_runner.model, state.hidden_states
        )
        return hidden_states

    def _backfill(
        self,
        batch: Any,
        request_ids: list[str] | None,
        within: Rows | None = None,
    ) -> None:
        """Of some requests of the batch or of all, and of some rows or of all."""
        assert self.pending is not None
        rows = self.pending.take(batch.req_ids, request_ids, within)
        if rows is None:
            return
        for part in rows.passes(self.max_num_tokens):
            self._run_pass(part, batch)

    def _run_pass(self, part: BackfillPass, batch: Any) -> None:
        num_rows = part.num_rows
        requests = to_device(part.requests, self.device)
        starts = to_device(part.query_start_loc, self.device)
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
            query_start_loc_cpu=torch.from_numpy(part.query_start_loc),
            max_query_len=part.max_query_len,
            seq_lens=lengths.to(torch.int32),
            max_seq_len=self.max_model_len,
            block_tables=[
                table[requests] for table in self.block_tables.input_block_tables
            ],
            slot_mappings=slots,
            kv_cache_config=self.kv_cache_config,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound[part.requests],
            positions=part.positions,
        )
        self.input_buffers.input_ids[:num_rows] = self._tokens_after(part, batch)
        self.input_buffers.positions[:num_rows] = part.positions
        self.hidden_states[:num_rows] = part.hidden_states
        self.on_prefill_begin(len(part.requests))
        with self._kv_only():
            self._run_model(
                num_rows,
                metadata,
                build_slot_mappings_by_layer(slots, self.kv_cache_config),
                num_tokens_across_dp=None,
            )

    def _tokens_after(self, part: BackfillPass, batch: Any) -> torch.Tensor:
        """``[num_rows]`` int32: what was committed behind the positions of a pass."""
        states = batch.idx_mapping[to_device(part.request_of_row(), self.device)]
        token_ids: torch.Tensor = self.model_runner.req_states.all_token_ids.gpu
        return token_ids[states, part.positions + 1]
