"""Model Runner V2: drafts of extra heads, all of them from one pass."""

from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import (
    SpeculatorCudaGraphManager,
)
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import (
    TargetDependentARSpeculator,
)


class DraftsInOnePass(TargetDependentARSpeculator):
    """Mixin of speculators, in front of those that choose draft tokens."""

    drafts_nothing: bool

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        super().init_cudagraph_manager(cudagraph_mode)
        # No draft step follows the first pass.
        self.decode_cudagraph_manager = SpeculatorCudaGraphManager(
            self.vllm_config, self.device, CUDAGraphMode.NONE, 1
        )

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        # [num_tokens, hidden_size]
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        *args: Any,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``[num_reqs, K_max]`` int64, whatever the depth.

        Args:
            input_batch: vLLM's ``InputBatch``.
            attn_metadata: Of the target's pass, by layer.
            slot_mappings: The same.
            last_hidden_states: Of the target, behind its last layer.
            aux_hidden_states: Of the target, before its last layer.
            *args: vLLM's other arguments.
            num_speculative_tokens: The draft depth of the step.
            **kwargs: vLLM's.
        """
        assert aux_hidden_states is not None
        (trunk,) = aux_hidden_states
        drafts: torch.Tensor = super().propose(
            input_batch,
            attn_metadata,
            slot_mappings,
            trunk,
            None,
            *args,
            num_speculative_tokens=0 if num_speculative_tokens == 0 else 1,
            **kwargs,
        )
        return drafts

    def sample_draft(
        self,
        # [num_reqs, num_heads, hidden_size]
        hidden_states: torch.Tensor,
        # [num_reqs] int64
        sample_src_positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        # [] int64, on the device
        draft_step: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``[num_reqs]`` int64: the first draft tokens; those behind are in place."""
        num_reqs, num_heads, _ = hidden_states.shape
        drafts = self.draft_tokens[:num_reqs]
        for head in range(1 if self.drafts_nothing else num_heads):
            drafts[:, head] = super().sample_draft(
                hidden_states[:, head].contiguous(),
                sample_src_positions + head,
                idx_mapping,
                temperature,
                seeds,
                draft_step + head,
                *args,
                **kwargs,
            )
        return drafts[:, 0]

    def target_hidden_states(self, state: Any) -> torch.Tensor:
        trunk: torch.Tensor = state.aux_hidden_states[0]
        return trunk
