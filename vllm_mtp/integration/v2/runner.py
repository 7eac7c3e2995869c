"""What vLLM's V2 model runner does around drafts, and more."""

from typing import Any

import torch
from vllm.v1.worker.gpu.async_utils import async_copy_to_np
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_mtp.integration.load.compat import check_attributes
from vllm_mtp.integration.load.extend import extend
from vllm_mtp.integration.scheduler.messages import DraftedTokens, VerifiedDrafts
from vllm_mtp.integration.v2.adaptive_verification import VerifiesWhatPays, announce
from vllm_mtp.integration.v2.decode_graphs import log_graphs
from vllm_mtp.integration.v2.greedy_verification import GreedyVerification
from vllm_mtp.integration.v2.rejection_sampler import replace_rejection_sampler
from vllm_mtp.integration.worker.hidden_states import StepRows
from vllm_mtp.integration.worker.reports import Reports

RUNNER_ATTRIBUTES = (
    "adaptive_verification",
    "batch_sharder",
    "device",
    "execute_model_state",
    "pcp_manager",
    "req_states",
    "speculative_config",
    "use_aux_hidden_state_outputs",
    "vocab_size",
)


class MTPPlusRunner(Reports, GPUModelRunner):
    """The stages of a step, as far as they are ours, in their order."""

    _speculator: Any = None
    _greedy: GreedyVerification | None = None
    adaptive_verification: Any
    _skips_mtp_layers = False
    """In the step whose tokens are being sampled."""
    _leaves_out = False
    """Whether the step that is under way has fewer rows than were scheduled."""
    _verified: VerifiedDrafts | None = None
    """Of that step, if so."""

    @property
    def speculator(self) -> Any:
        """Ours; None in a step without the MTP layers, which then goes like one of an
        engine without speculation."""
        return None if self._skips_mtp_layers else self._speculator

    @speculator.setter
    def speculator(self, speculator: Any) -> None:
        self._speculator = speculator

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        replace_rejection_sampler(self)
        self._greedy = GreedyVerification(self)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        announce(self)
        super().initialize_kv_cache(*args, **kwargs)
        if self.adaptive_verification is not None:
            check_attributes(self, ("attn_groups", "decode_query_len"))
            extend(self.adaptive_verification, VerifiesWhatPays)
            self.adaptive_verification.model_runner = self

    def prepare_inputs(
        self, scheduler_output: Any, *args: Any, **kwargs: Any
    ) -> InputBatch:
        adaptive = self.adaptive_verification
        self._leaves_out = bool(
            adaptive is not None
            and adaptive.leaves_out
            and scheduler_output.scheduled_spec_decode_tokens
        )
        if self.rejection_sampler is not None:
            self.rejection_sampler.enable_adaptive_verification = self._leaves_out
        if self._leaves_out:
            return super().prepare_inputs(scheduler_output, *args, **kwargs)
        self.adaptive_verification = None
        try:
            return super().prepare_inputs(scheduler_output, *args, **kwargs)
        finally:
            self.adaptive_verification = adaptive

    def capture_model(self, *args: Any, profile_only: bool = False) -> int:
        num_bytes: int = super().capture_model(*args, profile_only=profile_only)
        if not profile_only:
            log_graphs(self, num_bytes)
        return num_bytes

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._speculator.begin_recording(scheduler_output)
        self._speculator.follow_weights()
        self._speculator.expect(scheduler_output)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def sample_tokens(self, grammar_output: Any) -> Any:
        speculator, state = self._speculator, self.execute_model_state
        speculator.begin_step(state)
        copies = speculator.take_copies(state)
        skips = state is not None and speculator.skips_mtp_layers(state)
        self._skips_mtp_layers = skips
        try:
            output = super().sample_tokens(grammar_output)
        finally:
            self._skips_mtp_layers = False
            speculator.end_step()
        if skips:
            with speculator.surviving():
                speculator.keep_pending(state)
                speculator.look(state)
        verified, self._verified = self._verified, None
        return self.with_report(output, speculator, verified, copies)

    def sample(
        self,
        # [num_tokens, hidden_size]
        hidden_states: torch.Tensor,
        input_batch: Any,
        grammar_output: Any,
    ) -> Any:
        greedy = self._greedy
        if grammar_output is None and greedy is not None and greedy.fits(input_batch):
            result = greedy.sample(hidden_states, input_batch)
        else:
            result = super().sample(hidden_states, input_batch, grammar_output)
        output, num_sampled, num_rejected = result
        self._speculator.commit(output.sampled_token_ids, num_sampled)
        if self._speculator.records_step:
            # As drafts read them, which of some models are others.
            read = self._speculator.target_hidden_states(self._speculator._step)
            rows = rows_of_step(read, input_batch, num_rejected)
            self._speculator.record(rows)
        if self._leaves_out:
            # Here before vLLM's copy of the tokens, for which the host waits anyhow.
            choice = async_copy_to_np(self.adaptive_verification.choice(input_batch))
            self._verified = VerifiedDrafts(input_batch.req_ids, choice)
        is_whole = self.batch_sharder is None and self.pcp_manager is None
        if self.sends_drafts and is_whole and input_batch.num_draft_tokens:
            self._drafted = drafted_tokens(input_batch, self._verified)
        return result


def drafted_tokens(batch: InputBatch, verified: VerifiedDrafts | None) -> DraftedTokens:
    """Draft tokens of a step, on their way to the host.

    Args:
        batch: Of the step.
        verified: Where some were left out: there are no rows of those.
    """
    scheduled = batch.num_draft_tokens_per_req
    return DraftedTokens(
        scheduled if verified is None else verified.counts[0],
        async_copy_to_np(batch.input_ids[: batch.num_tokens]),
        batch.num_scheduled_tokens - scheduled,
    )


def rows_of_step(
    # [num_tokens, hidden_size]
    hidden_states: torch.Tensor,
    input_batch: InputBatch,
    # [num_reqs]
    num_rejected: torch.Tensor,
) -> StepRows:
    """Of the step whose tokens have just been sampled."""
    starts = input_batch.query_start_loc[: input_batch.num_reqs + 1]
    return StepRows(
        input_batch.req_ids,
        starts,
        starts.diff() - num_rejected[: input_batch.num_reqs],
        input_batch.input_ids,
        input_batch.positions,
        hidden_states,
    )
