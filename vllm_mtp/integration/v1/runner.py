"""What vLLM's V1 model runner does around drafts, and more."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_mtp.integration.scheduler.messages import DraftedTokens
from vllm_mtp.integration.v1.steps_without_drafts import metadata_without_drafts
from vllm_mtp.integration.worker.reports import Reports

RUNNER_ATTRIBUTES = (
    "_draft_token_ids",
    "discard_request_mask",
    "effective_drafter_max_model_len",
    "execute_model_state",
    "input_batch",
    "optimistic_seq_lens_cpu",
    "num_spec_tokens",
    "prev_num_spec_tokens",
    "rejection_sampler",
    "requests",
    "sampler",
    "use_aux_hidden_state_outputs",
)


class MTPPlusRunner(Reports, GPUModelRunner):
    """The stages of a step, as far as they are ours, in their order."""

    drafter: Any
    before_sampling: Callable[[Any], None] | None = None
    """Called with the runner: a workaround of the CPU worker's."""

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self.drafter.begin_recording(scheduler_output)
        self.drafter.follow_weights()
        self.drafter.expect(scheduler_output)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _calc_spec_decode_metadata(
        self,
        # [num_reqs] each
        num_draft_tokens: np.ndarray[Any, Any],
        cu_num_scheduled_tokens: np.ndarray[Any, Any],
    ) -> Any:
        # A step without drafts goes without the detours that would be empty.
        if np.count_nonzero(num_draft_tokens):
            return super()._calc_spec_decode_metadata(
                num_draft_tokens, cu_num_scheduled_tokens
            )
        return metadata_without_drafts(cu_num_scheduled_tokens, self.device)

    def sample_tokens(self, grammar_output: Any) -> Any:
        if self.before_sampling is not None:
            self.before_sampling(self)
        self.drafter.begin_step(self.execute_model_state)
        try:
            output = super().sample_tokens(grammar_output)
        finally:
            self.drafter.end_step()
        return self.with_report(output, self.drafter)

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        with self.drafter.sampling(spec_decode_metadata):
            output = super()._sample(logits, spec_decode_metadata)
        self.drafter.commit(output.sampled_token_ids)
        if self.sends_drafts and spec_decode_metadata is not None:
            self._drafted = drafted_tokens(spec_decode_metadata)
        if self.drafter.records_step:
            self.drafter.record(self.drafter.rows_of_step(output.sampled_token_ids))
        return output

    def _copy_draft_token_ids_to_cpu(self, *args: Any, **kwargs: Any) -> None:
        drafts = self._draft_token_ids
        if torch.is_tensor(drafts) and drafts.shape[1] == 0:
            self.prev_num_spec_tokens = 0
        else:
            super()._copy_draft_token_ids_to_cpu(*args, **kwargs)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        scored: DraftTokenIds | None = self.drafter.scored(
            super().take_draft_token_ids()
        )
        return scored


def drafted_tokens(metadata: Any) -> DraftedTokens:
    """Draft tokens of a step, on their way to the host.

    Args:
        metadata: vLLM's ``SpecDecodeMetadata``.
    """
    # Here before vLLM's copy of the tokens, for which the host waits anyhow.
    token_ids = metadata.draft_token_ids.to("cpu", non_blocking=True)
    return DraftedTokens(metadata.num_draft_tokens, token_ids.numpy())
