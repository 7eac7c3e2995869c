"""The ops in C++ and CUDA: same functions as ``reference``, one launch each.

The libraries are optional (``setup.py`` builds what it can). Loading one registers its
kernels with the ops that ``schemas`` defines; torch then picks by device.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from vllm_mtp.kernels import schemas
from vllm_mtp.records import GreedyStep, RollbackPlan

NAME = "native"
FOLDER = Path(__file__).parents[1]
TOOLS = {
    "cpu": "torch and a C++ compiler",
    "cuda": "torch, a C++ compiler and nvcc",
}
"""What builds the library of each device type that has one."""

# Overloads, since a packet looks for the one that fits in every call.
_ops = getattr(torch.ops, schemas.NAMESPACE)
_rollback_metadata = _ops.rollback_metadata.default
_pad_rejected_rows = _ops.pad_rejected_rows.default
_scrub_rejected_slots = _ops.scrub_rejected_slots.default
_accept_greedily = _ops.accept_greedily.default


def rollback_metadata(
    plan: RollbackPlan,
    # [6, num_reqs] int32, mutated
    per_request: torch.Tensor,
    # [num_rows or more] int64, mutated
    slot_mapping: torch.Tensor,
) -> None:
    """As ``reference.rollback_metadata``."""
    _rollback_metadata(*plan, per_request, slot_mapping)


def accept_greedily(
    step: GreedyStep,
    # [num_reqs, num_columns] int64, mutated
    sampled_token_ids: torch.Tensor,
    # [num_reqs] int32, mutated
    num_sampled: torch.Tensor,
    # [num_reqs] int32, mutated
    num_rejected: torch.Tensor,
) -> None:
    """As ``reference.accept_greedily``."""
    _accept_greedily(*step, sampled_token_ids, num_sampled, num_rejected)


def pad_rejected_rows(
    # [num_rows or more] int64, mutated
    slot_mapping: torch.Tensor,
    # [num_reqs + 1] int32
    query_start_loc: torch.Tensor,
    # [num_reqs] int32 or int64
    num_rejected_tokens: torch.Tensor,
) -> None:
    """As ``reference.pad_rejected_rows``."""
    _pad_rejected_rows(slot_mapping, query_start_loc, num_rejected_tokens)


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
    """As ``reference.scrub_rejected_slots``; the table's addresses are believed."""
    _scrub_rejected_slots(
        kv_storages, slot_mappings, planes, query_start_loc, num_rejected_tokens
    )


def library_path(device_type: str) -> Path:
    """Where the build puts the library of a device type."""
    return FOLDER / f"_C_{device_type}.abi3.so"


@cache
def why_unavailable(device: torch.device) -> str | None:
    """Load the library of a device and try it there, once.

    Returns:
        None when its kernels run on ``device``, else why they do not: one sentence.
    """
    if device.type not in TOOLS:
        return f"there is no native library for {device.type}"
    if device.type == "cuda" and torch.version.cuda is None:
        return "this torch was built without CUDA"
    path = library_path(device.type)
    if not path.exists():
        return (
            f"{path} was not built; install {TOOLS[device.type]}, then reinstall "
            "vllm-mtp with --no-build-isolation"
        )
    load_library: Callable[[str], None] = torch.ops.load_library
    try:
        load_library(str(path))
        _try_on(device)
    except (OSError, RuntimeError) as error:
        # load_library hides what the linker said in its cause.
        return f"{path.name} does not run on {device}: {error.__cause__ or error}"
    return None


def _try_on(device: torch.device) -> None:
    """Run a kernel: a GPU or driver too old for the build shows only then."""
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    _pad_rejected_rows(slots, starts, starts[1:])
    if slots.item() != -1:
        raise RuntimeError("a kernel ran and wrote nothing")
