"""vLLM's rollback chain and our hooks in its place, each callable without an engine.

Between verification and the MTP layers' pass vLLM 0.32 runs, on Model Runner V1::

    prepare_next_token_ids_padded   backup token of every request, counts, next tokens
    prepare_inputs_padded           rejected tokens, last rows, metadata for the drafter
    _get_slot_mapping               copy of the slot mapping
    seq_lens -= num_rejected        in ``propose``, for the draft steps after the first

(``vllm/v1/spec_decode/llm_base_proposer.py``). ``UpstreamChain`` calls those methods of
vLLM, and ``DrafterHooks`` the methods of ours that take their places, on the same
verified step and with vLLM's own records around them. Both begin with the call of a
module, as the rejection sampler is one and our rollback is its forward hook.
"""

import warnings
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from vllm_mtp.integration.v1.drafter import MTPPlusProposer
from vllm_mtp.integration.worker.rollback import Rollback
from vllm_mtp.kernels.dispatch import Backend
from vllm_mtp.records import RollbackPlan

MTP_LAYER = "model.mtp_layers.0.self_attn.attn"
BLOCK_SIZE = 64
Proposer = TypeVar("Proposer", bound=SpecDecodeBaseProposer)


class HandedOver(NamedTuple):
    """What drafting is given of a verified step."""

    # [num_reqs] int32 each
    next_token_ids: torch.Tensor
    num_sampled_tokens: torch.Tensor
    num_rejected_tokens: torch.Tensor
    last_valid_rows: torch.Tensor
    # [num_reqs] int32; None with one draft token, where no later draft step reads it
    seq_lens: torch.Tensor | None
    # [num_rows] int64. Rejected rows: vLLM keeps their slots, ours have padding
    slot_mapping: torch.Tensor


def why_unavailable(device: torch.device) -> str | None:
    """Why vLLM's chain does not run on a device here; None where it does."""
    if current_platform.device_type != device.type:
        return (
            f"this vLLM runs on {current_platform.device_type or 'no device'}, not on "
            f"{device.type}"
        )
    _register_kernels()
    return None


def cpu_packing(dtype: torch.dtype, block_size: int, head_size: int) -> str:
    """How vLLM's CPU attention packs a cache on this machine: its ``isa``."""
    # Not at the top: a vLLM that was built for GPUs need not be able to import it.
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return _get_attn_isa(dtype, block_size, head_size)


class UpstreamChain:
    """vLLM's own methods on one step, again and again.

    Args:
        plan: of a step in which every request verified equally many drafts and none is
            discarded. It is copied: vLLM subtracts from the lengths in place.
    """

    def __init__(self, plan: RollbackPlan) -> None:
        self._step = _VerifiedStep(plan)
        self._proposer = self._step.furnish(EagleProposer)

    def __call__(self) -> HandedOver:
        step, proposer = self._step, self._proposer
        output = step.sampler(step.output)
        next_token_ids, num_sampled = proposer.prepare_next_token_ids_padded(
            output.sampled_token_ids, step.requests, step.batch, step.discarded.gpu
        )
        metadata, last_rows, num_rejected = proposer.prepare_inputs_padded(
            step.metadata, step.verified, num_sampled
        )
        num_rows = metadata.num_actual_tokens
        slots = proposer._get_slot_mapping(num_rows, metadata.slot_mapping)
        seq_lens = None
        if step.num_draft_tokens > 1:
            metadata.seq_lens -= num_rejected
            seq_lens = metadata.seq_lens
        return HandedOver(
            next_token_ids,
            num_sampled,
            num_rejected,
            last_rows,
            seq_lens,
            slots[MTP_LAYER],
        )


class DrafterHooks:
    """Our drafter's methods in the places of vLLM's, on one step, again and again.

    Args:
        plan: as of ``UpstreamChain``.
        kernels: backend that the drafter's rollback uses.
    """

    def __init__(self, plan: RollbackPlan, kernels: Backend) -> None:
        self._step = _VerifiedStep(plan)
        self._drafter = self._step.furnish(MTPPlusProposer)
        self._drafter.model_runner = self._step.runner
        self._drafter.rollback = Rollback.__new__(Rollback)
        self._drafter.rollback.kernels = kernels
        self._drafter.rollback.scrubs = False
        self._step.sampler.register_forward_hook(
            lambda module, arguments, output: self._drafter.after_verification(
                output.sampled_token_ids
            )
        )

    def __call__(self) -> HandedOver:
        step, drafter = self._step, self._drafter
        drafter.begin_step(step.state)
        output = step.sampler(step.output)
        next_token_ids, num_sampled = drafter.prepare_next_token_ids_padded(
            output.sampled_token_ids, step.requests, step.batch, step.discarded.gpu
        )
        metadata, last_rows, num_rejected = drafter.prepare_inputs_padded(
            step.metadata, step.verified, num_sampled
        )
        num_rows = metadata.num_actual_tokens
        slots = drafter._get_slot_mapping(num_rows, metadata.slot_mapping)
        seq_lens = None
        if step.num_draft_tokens > 1:
            assert drafter._rolled_back is not None
            seq_lens = metadata.seq_lens = drafter._rolled_back.seq_lens
        drafter.end_step()
        return HandedOver(
            next_token_ids,
            num_sampled,
            num_rejected,
            last_rows,
            seq_lens,
            slots[MTP_LAYER],
        )


class _Sampler(torch.nn.Module):
    """In the place of the rejection sampler; its work is not part of rollback."""

    def forward(self, output: Any) -> Any:
        return output


class _VerifiedStep:
    """vLLM's records of a step whose tokens were just sampled."""

    def __init__(self, plan: RollbackPlan) -> None:
        num_reqs, width = plan.sampled_token_ids.shape
        self.num_draft_tokens = width - 1
        self.plan = plan
        self.sampler = _Sampler()
        self.output = SimpleNamespace(sampled_token_ids=plan.sampled_token_ids)
        device = plan.discarded.device
        self.discarded = CpuGpuBuffer(num_reqs, dtype=torch.bool, device=device)
        self.metadata = _attention_metadata(plan)
        self.verified = SpecDecodeMetadata.make_dummy(
            [[0] * self.num_draft_tokens] * num_reqs, device
        )
        seq_lens = plan.seq_lens.tolist()
        lengths = [length - self.num_draft_tokens for length in seq_lens]
        self.requests = {
            str(i): _request(str(i), length) for i, length in enumerate(lengths)
        }
        self.batch = _input_batch(list(self.requests), lengths, plan.vocab_size)
        self.runner = SimpleNamespace(
            discard_request_mask=self.discarded,
            input_batch=self.batch,
            optimistic_seq_lens_cpu=plan.seq_lens.cpu(),
        )
        self.state = SimpleNamespace(
            scheduler_output=None,
            spec_decode_metadata=self.verified,
            spec_decode_common_attn_metadata=self.metadata,
            slot_mappings={MTP_LAYER: plan.slot_mapping},
        )

    def furnish(self, kind: type[Proposer]) -> Proposer:
        """A proposer with what the methods of this stage read, and no model."""
        proposer = object.__new__(kind)
        device = self.plan.discarded.device
        proposer.device = device
        proposer.backup_next_token_ids = CpuGpuBuffer(
            len(self.requests), dtype=torch.int32, device=device
        )
        proposer._slot_mapping_buffer = torch.zeros_like(self.plan.slot_mapping)
        proposer._draft_attn_layer_names = {MTP_LAYER}
        return proposer


def _attention_metadata(plan: RollbackPlan) -> CommonAttentionMetadata:
    num_reqs, max_query_len = plan.sampled_token_ids.shape
    max_seq_len = int(plan.seq_lens.max())
    return CommonAttentionMetadata(
        query_start_loc=plan.query_start_loc,
        query_start_loc_cpu=plan.query_start_loc.cpu(),
        seq_lens=plan.seq_lens.clone(),
        seq_lens_cpu_upper_bound=plan.seq_lens.cpu(),
        num_reqs=num_reqs,
        num_actual_tokens=plan.slot_mapping.shape[0],
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        block_table_tensor=torch.zeros(
            (num_reqs, -(-max_seq_len // BLOCK_SIZE)),
            dtype=torch.int32,
            device=plan.discarded.device,
        ),
        slot_mapping=plan.slot_mapping,
        causal=True,
    )


def _request(request_id: str, num_tokens: int) -> CachedRequestState:
    """Half of its tokens are prompt."""
    num_prompt_tokens = -(-num_tokens // 2)
    return CachedRequestState(
        req_id=request_id,
        prompt_token_ids=[1] * num_prompt_tokens,
        mm_features=[],
        sampling_params=None,
        generator=None,
        block_ids=([],),
        num_computed_tokens=num_tokens - 1,
        output_token_ids=[2] * (num_tokens - num_prompt_tokens),
    )


def _input_batch(
    request_ids: list[str], num_tokens: list[int], vocab_size: int
) -> InputBatch:
    """vLLM's own class, since the loop over requests goes through its properties."""
    batch = InputBatch.__new__(InputBatch)
    batch._req_ids = list(request_ids)
    batch.req_id_to_index = {name: i for i, name in enumerate(request_ids)}
    batch.num_tokens_no_spec = np.array(num_tokens, dtype=np.int32)
    batch.vocab_size = vocab_size
    return batch


@cache
def _register_kernels() -> None:
    """As a worker does; without Triton the chain's kernels are vLLM's C++ ones."""
    current_platform.import_kernels()
    with warnings.catch_warnings():
        # It looks at every module there is, deprecated attributes included.
        warnings.simplefilter("ignore", FutureWarning)
        current_platform.register_triton_kernel_overrides()
