"""Model Runner V2: vLLM's rejection sampler, over proposals that we keep."""

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    rejection_sample,
)

from vllm_mtp.integration.load.compat import check_attributes
from vllm_mtp.integration.v2.listed_logprobs import (
    ScoresListedTokens,
    leave_lists_out,
)
from vllm_mtp.integration.v2.proposals import Proposals

SAMPLER_ATTRIBUTES = (
    "logprob_token_ids_state",
    "logprobs_mode",
    "sampling_states",
    "use_fp64_gumbel",
)


class MTPPlusRejectionSampler(ScoresListedTokens):
    """Tests drawn drafts against `Proposals`, where there are any."""

    proposals: Proposals | None = None
    _verifies_copies = False
    """In the step that is under way."""

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: Any,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        if self.proposals is not None:
            self._verifies_copies = self.proposals.verifies_copies(input_batch)
            outdated = self.proposals.outdated_rows(input_batch)
            if outdated is not None and invalid_drafts is not None:
                outdated |= invalid_drafts
            invalid_drafts = invalid_drafts if outdated is None else outdated
        return super().__call__(logits, input_batch, draft_logits, invalid_drafts)

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        arguments = (
            draft_sampled,
            pos,
            cu_num_logits,
            idx_mapping,
            idx_mapping_np,
            expanded_idx_mapping,
            expanded_local_pos,
            seq_lens_upper_bound_np,
            verify_draft_sampled,
        )
        if self.proposals is None:
            return super()._verify(logits, draft_logits, *arguments)
        processed = self.sampler.apply_sampling_params(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        proposals = self.proposals.of_rows(expanded_idx_mapping, expanded_local_pos)
        if self._verifies_copies:
            self.proposals.put_copies(
                proposals, expanded_idx_mapping, expanded_local_pos, draft_sampled
            )
        states = self.sampler.sampling_states
        # vLLM's kernels look up a proposal by request and draft step. Here each row has
        # its own, so a request goes by the name of its first row.
        rows = torch.arange(len(logits), device=logits.device)
        sampled, num_sampled = rejection_sample(
            processed,
            proposals[:, None],
            verify_draft_sampled,
            cu_num_logits,
            pos,
            cu_num_logits[:-1],
            rows - expanded_local_pos,
            expanded_local_pos,
            states.temperature.gpu[expanded_idx_mapping],
            states.seeds.gpu[expanded_idx_mapping],
            self.num_speculative_steps,
            self.synthetic_conditional_rates,
            use_fp64=self.sampler.use_fp64_gumbel,
            use_block_verification=self.use_block_verification,
        )
        return processed, sampled, num_sampled


def replace_rejection_sampler(runner: Any) -> None:
    """Put ours in the place of vLLM's.

    Args:
        runner: vLLM's V2 model runner, whose samplers have just been built.
    """
    theirs, sampler = runner.rejection_sampler, runner.sampler
    if type(theirs) is not RejectionSampler:
        return  # none on this rank, or one that the model brings
    check_attributes(sampler, SAMPLER_ATTRIBUTES)
    ours = MTPPlusRejectionSampler(
        sampler,
        runner.speculative_config,
        runner.device,
        watermark_key=theirs.watermark_key,
    )
    ours.proposals = runner.speculator.proposals
    runner.rejection_sampler = ours
    leave_lists_out(sampler)
