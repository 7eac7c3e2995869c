"""Model Runner V2: no MTP forward while drafting is off, one catch-up when it resumes.

A step without drafting goes like one of a runner without a speculator: what vLLM does
for one that has nothing to do, and what we kept of the step, took as long as drafting
one token on an H100 with 1.65B parameters, whose steps wait for the host. What is kept
now is two copies; the tokens are on the device anyhow.

The catch-up fills the speculator's own input buffers and runs its model, without the
head and without touching what the step's own draft pass has been given. It ends as soon
as the KV is written, where that is possible (`key_value_passes`), as do draft passes of
steps that draft nothing: there vLLM's run the head, too.
"""

from typing import Any

import torch
from vllm.v1.worker.gpu.attn_utils import (
    build_attn_metadata,
    build_slot_mappings_by_layer,
)
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import get_drafter_hidden_states

from vllm_mtp.control.catching_up import caught_up_now
from vllm_mtp.drafting.unseen_tokens import CatchUpPass, UnseenTokens
from vllm_mtp.integration.load.compat import check_attributes
from vllm_mtp.integration.worker import drafting_disabled
from vllm_mtp.integration.worker.kv_only_passes import WritesKeysAndValues

PAUSE_ATTRIBUTES = ("hidden_states", "input_buffers", "max_num_tokens")
PAUSED_RUNNER_ATTRIBUTES = ("execute_model_state", "req_states", "sample_tokens")


class RestsWhileOff(WritesKeysAndValues, DraftModelSpeculator):
    """Mixin of speculators."""

    can_rest = True
    _rests_while_off = False
    _drafts_nothing = False
    """In the step that is under way."""
    unseen: UnseenTokens | None = None
    """None as well for speculators that read the target's KV."""
    model_runner: Any

    def load_model(self, target_model: Any) -> None:
        super().load_model(target_model)
        self.prepare_to_end_passes(self.draft_attn_layer_names)

    def prepare_to_rest(self) -> None:
        """Take the memory for rows that wait, where resting is allowed."""
        if not self.can_rest or not drafting_disabled.may_rest(self.vllm_config):
            return
        self._rests_while_off = True
        if self.advance_draft_positions:
            self.unseen = drafting_disabled.unseen_tokens_like(
                self.hidden_states, self.max_num_reqs
            )

    def propose(
        self,
        input_batch: Any,
        *args: Any,
        num_speculative_tokens: int | None = None,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        may_catch_up = self._rests_while_off and not dummy_run
        # Told no depth it drafts as deep as it can.
        may_catch_up &= num_speculative_tokens != 0
        if may_catch_up and self.unseen is not None and self.unseen.num_rows:
            waiting = self.unseen.counts(input_batch.req_ids)
            self._catch_up(input_batch, caught_up_now(waiting))
        self._drafts_nothing = num_speculative_tokens == 0 and not dummy_run
        try:
            return super().propose(
                input_batch,
                *args,
                num_speculative_tokens=num_speculative_tokens,
                dummy_run=dummy_run,
                **kwargs,
            )
        finally:
            self._drafts_nothing = False

    def _prefill(self, *args: Any, **kwargs: Any) -> None:
        with self.writing_only(self._drafts_nothing):
            super()._prefill(*args, **kwargs)

    def rests(self, state: Any) -> bool:
        """Whether the MTP layers rest in a step.

        Args:
            state: vLLM's ``ExecuteModelState``, of the target's pass that is over.
        """
        batch = state.input_batch
        return self._rests_while_off and drafting_disabled.mtp_layers_rest(
            state.num_spec_tokens_to_schedule,
            batch.num_reqs,
            batch.num_tokens,
            batch.num_draft_tokens,
        )

    def put_aside(self, state: Any) -> None:
        """Keep what the MTP layers would have read in a step in which they rest."""
        if self.unseen is None:
            return
        batch, num_reqs = state.input_batch, state.input_batch.num_reqs
        hidden_states = get_drafter_hidden_states(
            self.model_runner.model, state.hidden_states
        )
        self.unseen.make_room(
            num_reqs,
            self.model_runner.req_states.req_id_to_index.keys(),
            lambda: self._catch_up(batch, None),
        )
        self.unseen.add(
            batch.req_ids,
            batch.positions[:num_reqs],
            None,
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
        self.input_buffers.input_ids[:num_rows] = self._tokens_after(part, batch)
        self.input_buffers.positions[:num_rows] = part.positions
        self.hidden_states[:num_rows] = part.hidden_states
        self.on_prefill_begin(len(part.requests))
        with self.writing_only():
            self._run_model(
                num_rows,
                metadata,
                build_slot_mappings_by_layer(slots, self.kv_cache_config),
                num_tokens_across_dp=None,
            )

    def _tokens_after(self, part: CatchUpPass, batch: Any) -> torch.Tensor:
        """``[num_rows]`` int32: what was committed behind the positions of a pass."""
        requests = torch.from_numpy(part.request_of_row())
        states = batch.idx_mapping[requests.to(self.device)]
        token_ids: torch.Tensor = self.model_runner.req_states.all_token_ids.gpu
        return token_ids[states, part.positions + 1]


def rest_like_a_target_alone(runner: Any, speculator: RestsWhileOff) -> None:
    """Let a runner forget its speculator in steps in which the MTP layers rest.

    Args:
        runner: vLLM's V2 model runner.
        speculator: ours, already in its place.
    """
    check_attributes(runner, PAUSED_RUNNER_ATTRIBUTES)
    sample_tokens = runner.sample_tokens

    def sample_and_rest(grammar_output: Any) -> Any:
        state = runner.execute_model_state
        if state is None or not speculator.rests(state):
            return sample_tokens(grammar_output)
        runner.speculator = None
        try:
            output = sample_tokens(grammar_output)
        finally:
            runner.speculator = speculator
        with speculator.surviving():
            speculator.put_aside(state)
        return output

    runner.sample_tokens = sample_and_rest
