"""Model Runner V1: arguments of ``propose`` for passes over other rows than a step's.

vLLM runs the MTP layer over all rows of the target's pass, to fill its KV cache, and
drafts from one row of each request. Where many rows are only there for the cache
(prompts, or drafts of many requests) there are two passes: all rows for keys and values
alone, then the rows to draft from. KV backfill is a pass over rows of past steps.
"""

from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from vllm_mtp.drafting.pending_tokens import BackfillPass

PASS_ATTRIBUTES = ("block_size", "uses_mrope")

MIN_ROWS_SAVED_ON_CPU = 48
MIN_ROWS_SAVED = 512
"""What a second pass must save. It reads projections once more and makes some calls,
about a millisecond on a CPU core (reckoned); what is behind them in a small model's MTP
layer takes a tenth of one for each row there (timed). A GPU does some hundred rows of a
large one in the time of a few more launches (reckoned)."""


class RunsOtherRows(SpecDecodeBaseProposer):
    """Mixin of drafters."""

    def pays_two_passes(self, given: dict[str, Any]) -> bool:
        """Whether a step that drafts has many rows that are not drafted from.

        Args:
            given: Arguments of ``propose``.
        """
        metadata: CommonAttentionMetadata = given["common_attn_metadata"]
        on_cpu = current_platform.is_cpu()
        return (
            metadata.num_actual_tokens - metadata.num_reqs
            >= (MIN_ROWS_SAVED_ON_CPU if on_cpu else MIN_ROWS_SAVED)
            and not self.uses_mrope
            and given.get("mm_embed_inputs") is None
        )

    def of_last_rows(self, given: dict[str, Any]) -> dict[str, Any]:
        """``given`` for a pass over the rows to draft from."""
        metadata = given["common_attn_metadata"]
        rows = given["token_indices_to_sample"]
        if rows is None:
            rows = metadata.query_start_loc[1:] - 1
        rows, num_reqs = rows.long(), metadata.num_reqs
        part = BackfillPass(
            requests=np.arange(num_reqs),
            query_start_loc=np.arange(num_reqs + 1, dtype=np.int32),
            positions=given["target_positions"][rows],
            next_token_ids=given["next_token_ids"],
            hidden_states=given["target_hidden_states"][rows],
        )
        return given | self.of_rows(part, metadata)

    def of_rows(
        self, part: BackfillPass, given: CommonAttentionMetadata
    ) -> dict[str, Any]:
        """Arguments for a pass over given rows.

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
        self, part: BackfillPass, given: CommonAttentionMetadata
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
