"""The ops as Triton kernels: one launch each, nothing read by the host.

The same functions as ``reference``, for GPUs without the native library. The kernels
are in `triton_kernels`; without a GPU they run under Triton's interpreter, where Triton
was asked for it before this module was imported: so a machine without one tests them.
"""

import torch

from vllm_mtp.kernels import schemas, triton_kernels
from vllm_mtp.kernels.planes import NUM_COLUMNS
from vllm_mtp.kernels.reference import NOT_SAMPLED, PADDING_SLOT
from vllm_mtp.records import GreedyStep, RollbackPlan

try:
    import triton
except ImportError:
    triton = None

NAME = "triton"

ROWS_PER_BLOCK = 1024
"""Rows that a program rolls back at once; a prefill may own 8192."""
WORDS_PER_BLOCK = 512
"""Words, of ``vector_bytes`` each, that a program zeroes at once."""
MAX_TAIL_PROGRAMS = 32
"""Programs that pad the rows behind the last request."""


_ops = getattr(torch.ops, schemas.NAMESPACE)


INTERPRETED = triton is not None and not isinstance(
    triton_kernels.rollback_metadata, triton.runtime.JITFunction
)
"""Whether Triton's interpreter was on when this module was imported."""


def why_unavailable(device: torch.device) -> str | None:
    """Why these kernels cannot run on a device; None if they can."""
    if triton is None:
        return "Triton is not installed"
    if device.type == "cpu":
        if INTERPRETED:
            return None
        return "Triton compiles for GPUs only, and its interpreter is off"
    if device.type != "cuda":
        return f"the Triton kernels are not registered for {device.type!r} devices"
    if INTERPRETED:
        return "Triton's interpreter is on and cannot follow addresses of GPU memory"
    return None if torch.cuda.is_available() else "torch finds no GPU"


def rollback_metadata(
    plan: RollbackPlan,
    # [6, num_reqs] int32, mutated
    per_request: torch.Tensor,
    # [num_rows or more] int64, mutated
    slot_mapping: torch.Tensor,
) -> None:
    """``reference.rollback_metadata``, one launch."""
    _ops.rollback_metadata_triton.default(*plan, per_request, slot_mapping)


def accept_greedily(
    step: GreedyStep,
    # [num_reqs, num_columns] int64, mutated
    sampled_token_ids: torch.Tensor,
    # [num_reqs] int32, mutated
    num_sampled: torch.Tensor,
    # [num_reqs] int32, mutated
    num_rejected: torch.Tensor,
) -> None:
    """``reference.accept_greedily``, one launch."""
    _ops.accept_greedily_triton.default(
        *step, sampled_token_ids, num_sampled, num_rejected
    )


def pad_rejected_rows(
    # [num_rows or more] int64, mutated
    slot_mapping: torch.Tensor,
    # [num_reqs + 1] int32
    query_start_loc: torch.Tensor,
    # [num_reqs] int32 or int64
    num_rejected_tokens: torch.Tensor,
) -> None:
    """``reference.pad_rejected_rows``, one launch."""
    _ops.pad_rejected_rows_triton.default(
        slot_mapping, query_start_loc, num_rejected_tokens
    )


def scrub_rejected_slots(
    # one [num_bytes] uint8 tensor per storage, mutated
    kv_storages: list[torch.Tensor],
    # one [max_num_tokens] int64 tensor per cache group
    slot_mappings: list[torch.Tensor],
    # [num_planes, NUM_COLUMNS] int64
    planes: torch.Tensor,
    # [num_reqs + 1] int32
    query_start_loc: torch.Tensor,
    # [num_reqs] int32 or int64
    num_rejected_tokens: torch.Tensor,
) -> None:
    """``reference.scrub_rejected_slots``, one launch."""
    _ops.scrub_rejected_slots_triton.default(
        kv_storages, slot_mappings, planes, query_start_loc, num_rejected_tokens
    )


def _launch_rollback_metadata(
    sampled_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor | None,
    discarded: torch.Tensor,
    backup_next_token_ids: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    vocab_size: int,
    per_request: torch.Tensor,
    out_slot_mapping: torch.Tensor,
) -> None:
    num_reqs = discarded.shape[0]
    num_padded_rows = out_slot_mapping.shape[0]
    num_tail_programs = triton.cdiv(num_padded_rows, ROWS_PER_BLOCK)
    num_tail_programs = max(1, min(num_tail_programs, MAX_TAIL_PROGRAMS))
    has_drafts = cu_num_draft_tokens is not None
    triton_kernels.rollback_metadata[(num_reqs + num_tail_programs,)](
        num_reqs,
        vocab_size,
        sampled_token_ids,
        sampled_token_ids.stride(0),
        sampled_token_ids.stride(1),
        sampled_token_ids.shape[1],
        cu_num_draft_tokens if has_drafts else query_start_loc,
        discarded,
        backup_next_token_ids,
        query_start_loc,
        seq_lens,
        slot_mapping,
        slot_mapping.shape[0],
        per_request,
        per_request.stride(0),
        per_request.stride(1),
        out_slot_mapping,
        num_padded_rows,
        PADDING=PADDING_SLOT,
        HAS_DRAFTS=has_drafts,
        COLUMNS=triton.next_power_of_2(sampled_token_ids.shape[1]),
        ROWS=ROWS_PER_BLOCK,
    )


def _launch_pad_rejected_rows(
    slot_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_rejected_tokens: torch.Tensor,
) -> None:
    num_reqs = num_rejected_tokens.shape[0]
    if num_reqs == 0:
        return
    triton_kernels.pad_rejected_rows[(num_reqs,)](
        slot_mapping,
        slot_mapping.shape[0],
        query_start_loc,
        num_rejected_tokens,
        PADDING=PADDING_SLOT,
        ROWS=ROWS_PER_BLOCK,
    )


def _launch_scrub_rejected_slots(
    kv_storages: list[torch.Tensor],
    slot_mappings: list[torch.Tensor],
    planes: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_rejected_tokens: torch.Tensor,
) -> None:
    num_reqs, num_planes = num_rejected_tokens.shape[0], planes.shape[0]
    if num_reqs == 0 or num_planes == 0:
        return
    triton_kernels.scrub_rejected_slots[(num_reqs, num_planes)](
        planes,
        query_start_loc,
        num_rejected_tokens,
        COLUMNS=NUM_COLUMNS,
        WORDS=WORDS_PER_BLOCK,
    )


def _launch_accept_greedily(
    target_token_ids: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    logits_indices: torch.Tensor,
    cu_num_logits: torch.Tensor,
    seq_lens: torch.Tensor,
    idx_mapping: torch.Tensor,
    prefill_len: torch.Tensor,
    sampled_token_ids: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
) -> None:
    num_reqs, num_columns = sampled_token_ids.shape
    if num_reqs == 0:
        return
    triton_kernels.accept_greedily[(num_reqs,)](
        target_token_ids,
        input_ids,
        positions,
        logits_indices,
        cu_num_logits,
        seq_lens,
        idx_mapping,
        prefill_len,
        sampled_token_ids,
        num_columns,
        num_sampled,
        num_rejected,
        NOTHING=NOT_SAMPLED,
        COLUMNS=triton.next_power_of_2(num_columns),
        num_warps=1,
    )


def _register() -> None:
    launches = {
        "accept_greedily": _launch_accept_greedily,
        "rollback_metadata": _launch_rollback_metadata,
        "pad_rejected_rows": _launch_pad_rejected_rows,
        "scrub_rejected_slots": _launch_scrub_rejected_slots,
    }
    for name, launch in launches.items():
        # The CPU's key is for the interpreter.
        for key in ("CUDA", "CPU"):
            schemas.library.impl(  # type: ignore[no-untyped-call]
                f"{name}{schemas.TRITON_SUFFIX}", launch, key
            )


if triton is not None:
    _register()
