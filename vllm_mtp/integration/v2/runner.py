"""What vLLM's V2 model runner does around drafts, and more."""

from typing import Any

import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_mtp.integration.v2.decode_graphs import log_graphs
from vllm_mtp.integration.v2.greedy_verification import GreedyVerification
from vllm_mtp.integration.v2.rejection_sampler import replace_rejection_sampler
from vllm_mtp.integration.worker.reports import Reports

RUNNER_ATTRIBUTES = (
    "batch_sharder",
    "device",
    "execute_model_state",
    "pcp_manager",
    "req_states",
    "speculative_config",
    "vocab_size",
)


class MTPPlusRunner(Reports, GPUModelRunner):
    """The stages of a step, as far as they are ours, in their order."""

    _speculator: Any = None
    _greedy: GreedyVerification | None = None
    _skips_mtp_layers = False
    """In the step whose tokens are being sampled."""

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

    def capture_model(self, *args: Any, profile_only: bool = False) -> int:
        num_bytes: int = super().capture_model(*args, profile_only=profile_only)
        if not profile_only:
            log_graphs(self, num_bytes)
        return num_bytes

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._speculator.expect(scheduler_output)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def sample_tokens(self, grammar_output: Any) -> Any:
        speculator, state = self._speculator, self.execute_model_state
        speculator.begin_step(state)
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
        return self.with_report(output, speculator)

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
        output, num_sampled, _ = result
        self._speculator.commit(output.sampled_token_ids, num_sampled)
        return result
