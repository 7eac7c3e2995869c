"""Model Runner V1: the MTP layer's first pass of a step, without what nobody reads.

vLLM runs the MTP layer over all rows of the target's pass, to fill its KV cache, and
drafts from one row of each request. Where a step drafts nothing the pass ends behind
keys and values. Where it drafts and has many rows (prompts, or drafts of many requests)
there are two passes: all rows as far as keys and values, then the rows to draft from.
"""

from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from vllm_mtp.drafting.unseen_tokens import CatchUpPass
from vllm_mtp.integration.worker.kv_only_passes import WritesKeysAndValues

FIRST_PASS_ATTRIBUTES = ("block_size", "uses_mrope")

MIN_ROWS_SAVED_ON_CPU = 48
MIN_ROWS_SAVED = 512
"""What a second pass must save. It reads projections once more and makes some calls,
about a millisecond on a CPU core (reckoned); what is behind them in a small model's MTP
layer takes a tenth of one for each row there (timed). A GPU does some hundred rows of a
large one in the time of a few more launches (reckoned)."""


class ShortensFirstPass(WritesKeysAndValues, SpecDecodeBaseProposer):
    """Mixin of drafters."""

    def load_model(self, target_model: Any) -> None:
        super().load_model(target_model)
        self.prepare_to_end_passes(self._draft_attn_layer_names)

    def propose(
        self, num_speculative_tokens: int, *args: Any, **given: Any
    ) -> torch.Tensor:
        """As vLLM's, whose other arguments are given by name."""
        metadata: CommonAttentionMetadata = given["common_attn_metadata"]
        drafts = num_speculative_tokens > 0
        if drafts and not self._runs_twice(metadata, given):
            return super().propose(num_speculative_tokens, *args, **given)
        with self.writing_only():
            return super().propose(0, *args, **given)
        if not drafts:
            shape = (metadata.num_reqs, 0)
            return given["next_token_ids"].new_empty(shape, dtype=torch.int64)
        given |= self._of_last_rows(given)
        return super().propose(num_speculative_tokens, *args, **given)

    def _runs_twice(
        self, metadata: CommonAttentionMetadata, given: dict[str, Any]
    ) -> bool:
        return (
            self.can_end_passes
            and metadata.num_actual_tokens - metadata.num_reqs >= _min_rows_saved()
            and not self.uses_mrope
            and given.get("mm_embed_inputs") is None
        )

    def _of_last_rows(self, given: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the pass over the rows to draft from."""
        metadata = given["common_attn_metadata"]
        rows = given["token_indices_to_sample"]
        if rows is None:
            rows = metadata.query_start_loc[1:] - 1
        rows, num_reqs = rows.long(), metadata.num_reqs
        part = CatchUpPass(
            requests=np.arange(num_reqs),
            query_start_loc=np.arange(num_reqs + 1, dtype=np.int32),
            positions=given["target_positions"][rows],
            next_token_ids=given["next_token_ids"],
            hidden_states=given["target_hidden_states"][rows],
        )
        return self.inputs_of(part, metadata)

    def inputs_of(
        self, part: CatchUpPass, given: CommonAttentionMetadata
    ) -> dict[str, Any]:
        """Arguments of ``propose`` for a pass over other rows than a step's own.

        Args:
            part: The rows, of requests of the step.
            given: Of the step.
        """
        last_rows = part.last_rows()
        return {
            # vLLM shifts token ids by one itself: undo that beforehand.
            "target_token_ids": part.next_token_ids.roll(1),
            "target_positions": part.positions,
            "target_hidden_states": part.hidden_states,
            "next_token_ids": part.next_token_ids[last_rows],
            "token_indices_to_sample": last_rows,
            "common_attn_metadata": self._metadata_of(part, given),
        }

    def _metadata_of(
        self, part: CatchUpPass, given: CommonAttentionMetadata
    ) -> CommonAttentionMetadata:
        requests = torch.from_numpy(part.requests)
        starts = torch.from_numpy(part.query_start_loc)
        owners = torch.repeat_interleave(starts.diff().long())
        block_tables = given.block_table_tensor[requests.to(self.device)]
        blocks = block_tables[
            owners.to(self.device), part.positions // self.block_size
        ].long()
        seq_lens = part.positions[part.last_rows()] + 1
        bound = given.seq_lens_cpu_upper_bound
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=seq_lens.to(given.seq_lens.dtype),
            seq_lens_cpu_upper_bound=None if bound is None else bound[requests],
            num_reqs=len(requests),
            num_actual_tokens=part.num_rows,
            max_query_len=part.max_query_len,
            max_seq_len=given.max_seq_len,
            block_table_tensor=block_tables,
            slot_mapping=blocks * self.block_size + part.positions % self.block_size,
            causal=True,
        )


def _min_rows_saved() -> int:
    return MIN_ROWS_SAVED_ON_CPU if current_platform.is_cpu() else MIN_ROWS_SAVED
