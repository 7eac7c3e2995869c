"""Checked mode: what the kernels believe is looked at before they run.

The kernels follow addresses and counts that lie on the device; a wrong one is a wrong
answer or a wild write, and no error. ``checked`` wraps a backend so that every plan is
refused in words first. For tests: each check copies to the host and waits. Nothing of
it is on the way of an unwrapped backend.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from tests.support.checked_scrub import BlockTable, check_scrub_plan
from tests.support.checks import (
    INTEGERS,
    InvalidRollbackPlanError,
    check_dense,
    check_length,
    check_no_alias,
    check_rejected,
    check_starts,
    check_tensor,
    refuse,
)
from vllm_mtp.kernels.reference import NUM_OUTPUTS, PADDING_SLOT
from vllm_mtp.records import GreedyStep, RollbackPlan

__all__ = [
    "BlockTable",
    "InvalidRollbackPlanError",
    "check_greedy_step",
    "check_pad_plan",
    "check_rollback_plan",
    "check_scrub_plan",
    "checked",
]

AnyBackend = TypeVar("AnyBackend")


def check_rollback_plan(
    plan: RollbackPlan,
    # [6, num_reqs] int32
    per_request: torch.Tensor,
    # [num_rows or more] int64
    slot_mapping: torch.Tensor,
) -> None:
    """Check the arguments of ``rollback_metadata``.

    Raises:
        InvalidRollbackPlanError: a dtype, device, shape or value is not allowed, or an
            output shares memory with another tensor.
    """
    _check_plan_tensors(plan, per_request, slot_mapping)
    inputs = {name: t for name, t in plan._asdict().items() if _is_tensor(t)}
    outputs = {"per_request": per_request, "out_slot_mapping": slot_mapping}
    check_no_alias(outputs, inputs)
    if plan.vocab_size < 1:
        refuse("vocab_size", plan.vocab_size, "1 or more")

    num_reqs, num_rows = plan.discarded.shape[0], plan.slot_mapping.shape[0]
    starts = check_starts(plan.query_start_loc)[: num_reqs + 1]
    if num_rows < starts[-1]:
        refuse(
            f"query_start_loc[{num_reqs}]",
            starts[-1],
            f"at most the {num_rows} rows of slot_mapping",
        )
    num_drafts = _check_num_drafts(plan, starts)
    _check_sampled(plan, starts, num_drafts)
    seq_lens = plan.seq_lens.tolist()
    for request in range(num_reqs):
        rows = starts[request + 1] - starts[request]
        if seq_lens[request] < rows:
            refuse(
                f"seq_lens[{request}]",
                seq_lens[request],
                f"at least the request's {rows} rows",
            )
    for row, slot in enumerate(plan.slot_mapping[: starts[-1]].tolist()):
        if slot < PADDING_SLOT:
            refuse(f"slot_mapping[{row}]", slot, f"a slot or {PADDING_SLOT}")


def check_pad_plan(
    # [num_rows or more] int64
    slot_mapping: torch.Tensor,
    # [num_reqs + 1] int32
    query_start_loc: torch.Tensor,
    # [num_reqs] int32 or int64
    num_rejected_tokens: torch.Tensor,
) -> None:
    """Check the arguments of ``pad_rejected_rows``.

    Raises:
        InvalidRollbackPlanError: as in ``check_rollback_plan``.
    """
    counts = {
        "query_start_loc": query_start_loc,
        "num_rejected_tokens": num_rejected_tokens,
    }
    check_dense("slot_mapping", slot_mapping, (torch.int64,), slot_mapping.device)
    starts, _ = check_rejected(counts, slot_mapping.device)
    check_length("slot_mapping", slot_mapping, starts[-1], "the step's rows")
    check_no_alias({"slot_mapping": slot_mapping}, counts)


def check_greedy_step(
    step: GreedyStep,
    # [num_reqs, num_columns] int64
    sampled_token_ids: torch.Tensor,
    # [num_reqs] int32 each
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
) -> None:
    """Check the arguments of ``accept_greedily``.

    Raises:
        InvalidRollbackPlanError: as in ``check_rollback_plan``.
    """
    device, int32, int64 = num_sampled.device, (torch.int32,), (torch.int64,)
    longs = {"target_token_ids", "positions", "logits_indices", "idx_mapping"}
    inputs = step._asdict()
    for name, tensor in inputs.items():
        check_dense(name, tensor, int64 if name in longs else int32, device)
    outputs = {
        "sampled_token_ids": sampled_token_ids,
        "num_sampled": num_sampled,
        "num_rejected": num_rejected,
    }
    check_dense("sampled_token_ids", sampled_token_ids, int64, device, dims=2)
    num_reqs, num_columns = sampled_token_ids.shape
    for name in ("num_sampled", "num_rejected"):
        check_dense(name, outputs[name], int32, device)
        check_length(name, outputs[name], num_reqs, "the requests")
    check_no_alias(outputs, inputs)

    check_length("cu_num_logits", step.cu_num_logits, num_reqs + 1, "requests + 1")
    starts = check_starts(step.cu_num_logits, "cu_num_logits")[: num_reqs + 1]
    for name in ("seq_lens", "idx_mapping"):
        check_length(name, inputs[name], num_reqs, "the requests")
    for name in ("target_token_ids", "logits_indices"):
        check_length(name, inputs[name], starts[-1], "the requests' rows")
    for request in range(num_reqs):
        rows = starts[request + 1] - starts[request]
        if not 1 <= rows <= num_columns:
            allowed = f"{starts[request] + 1} to {starts[request] + num_columns}"
            refuse(f"cu_num_logits[{request + 1}]", starts[request + 1], allowed)
    num_tokens = min(step.input_ids.shape[0], step.positions.shape[0])
    _check_indices("logits_indices", step.logits_indices[: starts[-1]], num_tokens)
    _check_indices("idx_mapping", step.idx_mapping[:num_reqs], len(step.prefill_len))


def _check_indices(field: str, indices: torch.Tensor, end: int) -> None:
    for place, index in enumerate(indices.tolist()):
        if not 0 <= index < end:
            refuse(f"{field}[{place}]", index, f"0 to {end - 1}")


def checked(backend: AnyBackend) -> AnyBackend:
    """A backend that checks its arguments before every call.

    Args:
        backend: record or module with the functions; it is left as it is.

    Returns:
        A record like it; for a module a namespace with all of its names.
    """
    inner: Any = backend

    def rollback_metadata(*arguments: Any) -> None:
        check_rollback_plan(*arguments)
        inner.rollback_metadata(*arguments)

    def pad_rejected_rows(*arguments: Any) -> None:
        check_pad_plan(*arguments)
        inner.pad_rejected_rows(*arguments)

    def scrub_rejected_slots(*arguments: Any) -> None:
        check_scrub_plan(*arguments)
        inner.scrub_rejected_slots(*arguments)

    def accept_greedily(*arguments: Any) -> None:
        check_greedy_step(*arguments)
        inner.accept_greedily(*arguments)

    functions = {
        "accept_greedily": accept_greedily,
        "rollback_metadata": rollback_metadata,
        "pad_rejected_rows": pad_rejected_rows,
        "scrub_rejected_slots": scrub_rejected_slots,
    }
    if dataclasses.is_dataclass(inner) and not isinstance(inner, type):
        copy: Any = dataclasses.replace(inner, **functions)
    else:
        copy = SimpleNamespace(**{**vars(inner), **functions})
    return copy  # type: ignore[no-any-return]


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _check_plan_tensors(
    plan: RollbackPlan, per_request: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    device, int32, int64 = plan.discarded.device, (torch.int32,), (torch.int64,)
    check_dense("discarded", plan.discarded, (torch.bool,), device)
    num_reqs = plan.discarded.shape[0]
    tokens = plan.sampled_token_ids
    check_tensor("sampled_token_ids", tokens, INTEGERS, device, dims=2)
    check_length("sampled_token_ids", tokens, num_reqs, "the requests")
    if tokens.shape[1] < 1:
        refuse("sampled_token_ids.shape[1]", tokens.shape[1], "1 or more")
    per_req = {
        "backup_next_token_ids": plan.backup_next_token_ids,
        "seq_lens": plan.seq_lens,
    }
    if plan.cu_num_draft_tokens is not None:
        per_req["cu_num_draft_tokens"] = plan.cu_num_draft_tokens
    for name, tensor in per_req.items():
        check_dense(name, tensor, int32, device)
        check_length(name, tensor, num_reqs, "the requests")
    check_dense("query_start_loc", plan.query_start_loc, int32, device)
    check_length("query_start_loc", plan.query_start_loc, num_reqs + 1, "requests + 1")
    check_dense("slot_mapping", plan.slot_mapping, int64, device)

    check_tensor("per_request", per_request, int32, device, dims=2)
    if per_request.shape != (NUM_OUTPUTS, num_reqs):
        refuse(
            "per_request.shape",
            tuple(per_request.shape),
            f"({NUM_OUTPUTS}, {num_reqs})",
        )
    check_dense("out_slot_mapping", slot_mapping, int64, device)
    num_rows = plan.slot_mapping.shape[0]
    check_length("out_slot_mapping", slot_mapping, num_rows, "the plan's rows")


def _check_num_drafts(plan: RollbackPlan, starts: list[int]) -> list[int]:
    num_reqs = len(starts) - 1
    if plan.cu_num_draft_tokens is None:
        return [0] * num_reqs
    num_drafts, before = [], 0
    for request, total in enumerate(plan.cu_num_draft_tokens[:num_reqs].tolist()):
        field = f"cu_num_draft_tokens[{request}]"
        rows = starts[request + 1] - starts[request]
        if total < before:
            refuse(field, total, f"at least {before}, the value before it")
        if total - before > max(rows - 1, 0):
            refuse(
                field,
                total,
                f"at most {before + max(rows - 1, 0)}: the request has {rows} rows, of "
                "which the first is no draft",
            )
        num_drafts.append(total - before)
        before = total
    return num_drafts


def _check_sampled(
    plan: RollbackPlan, starts: list[int], num_drafts: list[int]
) -> None:
    tokens, discarded = plan.sampled_token_ids.tolist(), plan.discarded.tolist()
    for request, count in enumerate(num_drafts):
        if discarded[request] or starts[request] == starts[request + 1]:
            continue
        field = f"sampled_token_ids[{request}]"
        row = tokens[request]
        if min(row) < -1:
            refuse(field, row, "tokens, or -1 where none was sampled")
        num_sampled = sum(token != -1 and token < plan.vocab_size for token in row)
        if num_sampled > count + 1:
            refuse(field, row, f"at most {count + 1} tokens, for {count} draft tokens")
