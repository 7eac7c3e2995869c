"""Model Runner V1: no MTP forward while drafting is disabled, KV backfill after it.

The backfill is a pass without draft tokens over the rows of the pending tokens.
"""

from collections.abc import Callable
from typing import Any

from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_mtp.control.kv_backfill import backfilled_now
from vllm_mtp.drafting.pending_tokens import PendingTokens, Rows
from vllm_mtp.integration.v1.passes import RunsOtherRows
from vllm_mtp.integration.worker import drafting_disabled

BACKFILL_ATTRIBUTES = ("hidden_states", "max_num_tokens", "uses_mrope")


class BackfillsKV(RunsOtherRows):
    """Mixin of drafters."""

    can_disable = True
    may_disable = False
    """Whether steps without drafts may go without the MTP layers."""
    pending: PendingTokens | None = None
    """None as well for drafters that read the target's KV: they have none to fill."""
    run_kv_pass: Callable[[dict[str, Any]], None]
    """Runs the MTP layers for their keys and values alone."""
    model_runner: Any

    def prepare_to_disable(self) -> None:
        """Take the memory for pending tokens, where drafting may be disabled."""
        if (
            not self.can_disable
            or self.uses_mrope
            or not drafting_disabled.may_disable(self.vllm_config)
        ):
            return
        self.may_disable = True
        if not self.constant_draft_positions:
            self.pending = drafting_disabled.pending_tokens_like(
                self.hidden_states, self.max_batch_size
            )

    def forget_pending(self, scheduler_output: Any) -> None:
        """Drop rows of requests that are gone or will be computed anew."""
        if self.pending is None or not self.pending.num_rows:
            return
        finished = scheduler_output.finished_req_ids
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        if finished or resumed:
            self.pending.forget({*finished, *resumed})

    def skips_mtp_layers(self, metadata: CommonAttentionMetadata) -> bool:
        """Whether a step that drafts nothing goes without the MTP layers."""
        # A request that has drafts has more than one row, so none has any.
        return self.may_disable and drafting_disabled.skips_mtp_layers(
            0, metadata.num_reqs, metadata.num_actual_tokens, 0
        )

    def keep_pending(self, given: dict[str, Any]) -> None:
        """Keep what the MTP layers would have read in a step.

        Args:
            given: Arguments of ``propose``, of one row for each request.
        """
        if self.pending is None:
            return
        metadata, batch = given["common_attn_metadata"], self.model_runner.input_batch
        self.pending.make_room(
            metadata.num_reqs,
            self.model_runner.requests.keys(),
            lambda rows: self._backfill(metadata, None, rows),
        )
        self.pending.add(
            batch.req_ids,
            given["target_positions"],
            given["next_token_ids"],
            given["target_hidden_states"][: metadata.num_reqs],
        )

    def backfill(self, metadata: CommonAttentionMetadata) -> None:
        """Before a step drafts: some of its requests' pending tokens are read."""
        if self.pending is not None and self.pending.num_rows:
            counts = self.pending.counts(self.model_runner.input_batch.req_ids)
            self._backfill(metadata, backfilled_now(counts))

    def _backfill(
        self,
        metadata: CommonAttentionMetadata,
        request_ids: list[str] | None,
        within: Rows | None = None,
    ) -> None:
        """Of some requests of the batch or of all, and of some rows or of all."""
        assert self.pending is not None
        batch = self.model_runner.input_batch
        rows = self.pending.take(batch.req_ids, request_ids, within)
        if rows is None:
            return
        # The rollback has written this step's slots there already.
        slots = self._slot_mapping_buffer[: metadata.num_actual_tokens].clone()
        for part in rows.passes(self.max_num_tokens):
            self.run_kv_pass(self.of_rows(part, metadata) | {"sampling_metadata": None})
        self._slot_mapping_buffer[: slots.shape[0]] = slots
