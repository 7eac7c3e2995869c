"""Checked mode: what the kernels believe is looked at before they run.

The kernels follow addresses and counts that lie on the device; a wrong one is a wrong
answer or a wild write, and no error. ``checked`` wraps a backend so that every plan is
refused in words first. For tests and for debugging: each check copies to the host and
waits. Nothing of it is on the way of an unwrapped backend.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch

from vllm_mtp.kernels.planes import NUM_COLUMNS, SlotPlane, planes_of_table
from vllm_mtp.kernels.reference import NUM_OUTPUTS, PADDING_SLOT
from vllm_mtp.records import RollbackPlan

AnyBackend = TypeVar("AnyBackend")
INTEGERS = (torch.int32, torch.int64)
BYTE_FIELDS = (
    "base_address",
    "block_stride",
    "group_stride",
    "slot_stride",
    "stride_0",
    "stride_1",
    "stride_2",
    "chunk_bytes",
)
"""Columns of the plane table that an access of ``vector_bytes`` must divide."""


class InvalidRollbackPlanError(ValueError):
    """A plan that no scheduler makes; the sentence names field, value and rule."""


class BlockTable(NamedTuple):
    """Who owns which blocks of one cache group.

    Request ``i`` owns blocks ``block_ids[i, :num_blocks[i]]``, as far as they are
    positive: 0 is the null block and -1 is padding. Entries from ``num_blocks[i]`` on
    are leftovers of former requests, as in vLLM, and mean nothing.
    """

    # [num_reqs, max_blocks] int32
    block_ids: torch.Tensor
    # [num_reqs]
    num_blocks: torch.Tensor
    block_size: int
    """Slots per block of this table: slot ``s`` lies in block ``s // block_size``."""

    def blocks_of(self, request: int) -> set[int]:
        num_blocks = int(self.num_blocks[request])
        blocks = self.block_ids[request, :num_blocks].tolist()
        return {block for block in blocks if block > 0}


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
    _check_no_alias(outputs, inputs)
    if plan.vocab_size < 1:
        _refuse("vocab_size", plan.vocab_size, "1 or more")

    num_reqs, num_rows = plan.discarded.shape[0], plan.slot_mapping.shape[0]
    starts = _check_starts(plan.query_start_loc)[: num_reqs + 1]
    if num_rows < starts[-1]:
        _refuse(
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
            _refuse(
                f"seq_lens[{request}]",
                seq_lens[request],
                f"at least the request's {rows} rows",
            )
    for row, slot in enumerate(plan.slot_mapping[: starts[-1]].tolist()):
        if slot < PADDING_SLOT:
            _refuse(f"slot_mapping[{row}]", slot, f"a slot or {PADDING_SLOT}")


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
    _check_dense("slot_mapping", slot_mapping, (torch.int64,), slot_mapping.device)
    starts, _ = _check_rejected(counts, slot_mapping.device)
    _check_length("slot_mapping", slot_mapping, starts[-1], "the step's rows")
    _check_no_alias({"slot_mapping": slot_mapping}, counts)


def check_scrub_plan(
    # one [num_bytes] uint8 tensor per storage
    kv_storages: Sequence[torch.Tensor],
    # one [max_num_tokens] int64 tensor per cache group
    slot_mappings: Sequence[torch.Tensor],
    # [num_planes, NUM_COLUMNS] int64
    planes: torch.Tensor,
    # [num_reqs + 1] int32
    query_start_loc: torch.Tensor,
    # [num_reqs] int32 or int64
    num_rejected_tokens: torch.Tensor,
    *,
    # [num_reqs] integers
    num_draft_tokens: torch.Tensor | None = None,
    block_tables: Sequence[BlockTable] | None = None,
) -> None:
    """Check the arguments of ``scrub_rejected_slots``, its addresses included.

    Args:
        kv_storages: the memory that the planes may touch.
        slot_mappings: what the planes' ``slot_mapping_address`` may be.
        planes: table of ``planes.plane_table``.
        query_start_loc: first row of each request.
        num_rejected_tokens: rejected rows at the end of each request.
        num_draft_tokens: no more than these can be rejected; None: than rows.
        block_tables: who owns which block, in the order of ``slot_mappings``; a
            rejected slot must lie in a block of its request, and of no other.

    Raises:
        InvalidRollbackPlanError: as in ``check_rollback_plan``; also a slot that does
            not exist, or that two rows have, or in a block of another request, and a
            plane that leaves its storage.
    """
    device = planes.device
    _check_dense("planes", planes, (torch.int64,), device, dims=2)
    if planes.shape[1] != NUM_COLUMNS:
        _refuse("planes.shape[1]", planes.shape[1], f"{NUM_COLUMNS}")
    storages = {f"kv_storages[{i}]": t for i, t in enumerate(kv_storages)}
    mappings = {f"slot_mappings[{i}]": t for i, t in enumerate(slot_mappings)}
    counts = {
        "query_start_loc": query_start_loc,
        "num_rejected_tokens": num_rejected_tokens,
    }
    for name, storage in storages.items():
        _check_dense(name, storage, (torch.uint8,), device)
    starts, rejected = _check_rejected(counts, device, num_draft_tokens)
    for name, mapping in mappings.items():
        _check_dense(name, mapping, (torch.int64,), device)
        _check_length(name, mapping, starts[-1], "the step's rows")
    inputs = {"planes": planes, **mappings, **counts}
    for name, storage in storages.items():
        _check_no_alias({name: storage}, inputs)

    of_mapping: dict[int, list[SlotPlane]] = {t.data_ptr(): [] for t in slot_mappings}
    for index, plane in enumerate(planes_of_table(planes)):
        _check_plane(f"planes[{index}]", plane, kv_storages, of_mapping)
        of_mapping[plane.slot_mapping_address].append(plane)
    for index, (name, mapping) in enumerate(mappings.items()):
        rows = _Rows(name, mapping[: starts[-1]].tolist(), starts, rejected)
        first_slot = _check_slots(rows, of_mapping[mapping.data_ptr()])
        if block_tables is not None:
            _check_blocks(rows, first_slot, block_tables[index])


def checked(backend: AnyBackend) -> AnyBackend:
    """A backend that checks its arguments before every call.

    Args:
        backend: record or module with the three functions; it is left as it is.

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

    functions = {
        "rollback_metadata": rollback_metadata,
        "pad_rejected_rows": pad_rejected_rows,
        "scrub_rejected_slots": scrub_rejected_slots,
    }
    if dataclasses.is_dataclass(inner) and not isinstance(inner, type):
        copy: Any = dataclasses.replace(inner, **functions)
    else:
        copy = SimpleNamespace(**{**vars(inner), **functions})
    return copy  # type: ignore[no-any-return]


class _Rows(NamedTuple):
    """One group's slots of a step, on the host."""

    field: str
    slots: list[int]
    starts: list[int]
    num_rejected: list[int]

    def kind_of(self, row: int) -> str:
        rejected = any(row == other for _, other, _ in self.rejected())
        return "rejected" if rejected else "committed"

    def rejected(self) -> Iterator[tuple[int, int, int]]:
        """Request, row and slot of each rejected row."""
        for request, count in enumerate(self.num_rejected):
            end = self.starts[request + 1]
            for row in range(end - count, end):
                yield request, row, self.slots[row]


def _refuse(field: str, value: object, allowed: str) -> NoReturn:
    raise InvalidRollbackPlanError(
        f"{field} = {value} is not allowed; must be {allowed}"
    )


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _check_plan_tensors(
    plan: RollbackPlan, per_request: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    device, int32, int64 = plan.discarded.device, (torch.int32,), (torch.int64,)
    _check_dense("discarded", plan.discarded, (torch.bool,), device)
    num_reqs = plan.discarded.shape[0]
    tokens = plan.sampled_token_ids
    _check_tensor("sampled_token_ids", tokens, INTEGERS, device, dims=2)
    _check_length("sampled_token_ids", tokens, num_reqs, "the requests")
    if tokens.shape[1] < 1:
        _refuse("sampled_token_ids.shape[1]", tokens.shape[1], "1 or more")
    per_req = {
        "backup_next_token_ids": plan.backup_next_token_ids,
        "seq_lens": plan.seq_lens,
    }
    if plan.cu_num_draft_tokens is not None:
        per_req["cu_num_draft_tokens"] = plan.cu_num_draft_tokens
    for name, tensor in per_req.items():
        _check_dense(name, tensor, int32, device)
        _check_length(name, tensor, num_reqs, "the requests")
    _check_dense("query_start_loc", plan.query_start_loc, int32, device)
    _check_length("query_start_loc", plan.query_start_loc, num_reqs + 1, "requests + 1")
    _check_dense("slot_mapping", plan.slot_mapping, int64, device)

    _check_tensor("per_request", per_request, int32, device, dims=2)
    if per_request.shape != (NUM_OUTPUTS, num_reqs):
        _refuse(
            "per_request.shape",
            tuple(per_request.shape),
            f"({NUM_OUTPUTS}, {num_reqs})",
        )
    _check_dense("out_slot_mapping", slot_mapping, int64, device)
    num_rows = plan.slot_mapping.shape[0]
    _check_length("out_slot_mapping", slot_mapping, num_rows, "the plan's rows")


def _check_tensor(
    field: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    dims: int = 1,
) -> None:
    if tensor.dtype not in dtypes:
        _refuse(f"{field}.dtype", tensor.dtype, " or ".join(map(str, dtypes)))
    if tensor.device != device:
        _refuse(f"{field}.device", tensor.device, f"{device}, as of the other tensors")
    if tensor.dim() != dims:
        _refuse(f"{field}.dim()", tensor.dim(), f"{dims}")


def _check_dense(
    field: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    dims: int = 1,
) -> None:
    _check_tensor(field, tensor, dtypes, device, dims)
    if not tensor.is_contiguous():
        _refuse(f"{field}.stride()", tensor.stride(), "contiguous")


def _check_length(field: str, tensor: torch.Tensor, least: int, of: str) -> None:
    if tensor.shape[0] < least:
        _refuse(f"{field}.shape[0]", tensor.shape[0], f"at least {least} ({of})")


def _check_no_alias(
    outputs: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor]
) -> None:
    """No output overlaps an input or an earlier output, from first to last element."""
    seen = dict(inputs)
    for name, output in outputs.items():
        start, end = _extent(output)
        for other, tensor in seen.items():
            other_start, other_end = _extent(tensor)
            if max(start, other_start) < min(end, other_end):
                _refuse(
                    f"{name}.data_ptr()",
                    hex(start),
                    f"memory that {other} has no part in",
                )
        seen[name] = output


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and of the one behind its last."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _check_starts(query_start_loc: torch.Tensor) -> list[int]:
    starts: list[int] = query_start_loc.tolist()
    if starts[0] != 0:
        _refuse("query_start_loc[0]", starts[0], "0")
    for index in range(1, len(starts)):
        if starts[index] < starts[index - 1]:
            _refuse(
                f"query_start_loc[{index}]",
                starts[index],
                f"at least {starts[index - 1]}, the value before it",
            )
    return starts


def _check_num_drafts(plan: RollbackPlan, starts: list[int]) -> list[int]:
    num_reqs = len(starts) - 1
    if plan.cu_num_draft_tokens is None:
        return [0] * num_reqs
    num_drafts, before = [], 0
    for request, total in enumerate(plan.cu_num_draft_tokens[:num_reqs].tolist()):
        field = f"cu_num_draft_tokens[{request}]"
        rows = starts[request + 1] - starts[request]
        if total < before:
            _refuse(field, total, f"at least {before}, the value before it")
        if total - before > max(rows - 1, 0):
            _refuse(
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
            _refuse(field, row, "tokens, or -1 where none was sampled")
        num_sampled = sum(token != -1 and token < plan.vocab_size for token in row)
        if num_sampled > count + 1:
            _refuse(field, row, f"at most {count + 1} tokens, for {count} draft tokens")


def _check_rejected(
    counts: dict[str, torch.Tensor],
    device: torch.device,
    num_draft_tokens: torch.Tensor | None = None,
) -> tuple[list[int], list[int]]:
    """First rows and rejected rows of each request."""
    query_start_loc, num_rejected_tokens = counts.values()
    _check_dense("num_rejected_tokens", num_rejected_tokens, INTEGERS, device)
    _check_dense("query_start_loc", query_start_loc, (torch.int32,), device)
    rejected: list[int] = num_rejected_tokens.tolist()
    _check_length("query_start_loc", query_start_loc, len(rejected) + 1, "requests + 1")
    starts = _check_starts(query_start_loc)
    if starts[-1] != starts[len(rejected)]:
        _refuse(
            f"query_start_loc[{len(starts) - 1}]",
            starts[-1],
            f"{starts[len(rejected)]}, the end of the last request",
        )
    drafts = None if num_draft_tokens is None else num_draft_tokens.tolist()
    for request, count in enumerate(rejected):
        field = f"num_rejected_tokens[{request}]"
        rows = starts[request + 1] - starts[request]
        if not 0 <= count <= rows:
            _refuse(field, count, f"0 to {rows}, the request's rows")
        if drafts is not None and count > drafts[request]:
            _refuse(field, count, f"0 to {drafts[request]}, the request's draft tokens")
    return starts[: len(rejected) + 1], rejected


def _check_plane(
    field: str,
    plane: SlotPlane,
    kv_storages: Sequence[torch.Tensor],
    mapping_addresses: dict[int, list[SlotPlane]],
) -> None:
    if plane.slot_mapping_address not in mapping_addresses:
        _refuse(
            f"{field}.slot_mapping_address",
            hex(plane.slot_mapping_address),
            f"the address of one of slot_mappings: {[*map(hex, mapping_addresses)]}",
        )
    for dividend, divisor in (
        ("num_slots", "block_size"),
        ("block_size", "group_size"),
    ):
        value, unit = getattr(plane, dividend), getattr(plane, divisor)
        if unit < 1 or value < unit or value % unit:
            _refuse(f"{field}.{dividend}", value, f"a multiple of {divisor} = {unit}")
    for name in ("count_0", "count_1", "count_2", "chunk_bytes"):
        if getattr(plane, name) < 1:
            _refuse(f"{field}.{name}", getattr(plane, name), "1 or more")
    if plane.vector_bytes not in (1, 2, 4, 8, 16):
        _refuse(f"{field}.vector_bytes", plane.vector_bytes, "1, 2, 4, 8 or 16")
    for name in BYTE_FIELDS:
        if getattr(plane, name) % plane.vector_bytes:
            _refuse(
                f"{field}.{name}",
                getattr(plane, name),
                f"a multiple of vector_bytes = {plane.vector_bytes}",
            )
    extents = [_extent(storage) for storage in kv_storages]
    start, end = plane.base_address, plane.end_address
    if not any(first <= start and end <= last for first, last in extents):
        _refuse(
            f"{field}.base_address",
            f"{start:#x} (to {end:#x})",
            "within one storage: "
            + ", ".join(f"{first:#x} to {last:#x}" for first, last in extents),
        )


def _check_slots(rows: _Rows, planes: list[SlotPlane]) -> int:
    """Check a group's slots; returns the first that no null block holds."""
    first_slot = min((plane.first_slot for plane in planes), default=0)
    num_slots = min((plane.num_slots for plane in planes), default=None)
    row_of: dict[int, int] = {}
    for row, slot in enumerate(rows.slots):
        field = f"{rows.field}[{row}]"
        if slot < PADDING_SLOT or (num_slots is not None and slot >= num_slots):
            _refuse(field, slot, f"{PADDING_SLOT}, or a slot below {num_slots}")
        if slot < max(first_slot, 0):
            continue
        other = row_of.setdefault(slot, row)
        if other != row:
            _refuse(
                field,
                slot,
                f"another slot than that of row {other} (row {row} is "
                f"{rows.kind_of(row)}, row {other} is {rows.kind_of(other)})",
            )
    return first_slot


def _check_blocks(rows: _Rows, first_slot: int, table: BlockTable) -> None:
    owned = [table.blocks_of(request) for request in range(len(rows.num_rejected))]
    for request, row, slot in rows.rejected():
        if slot < max(first_slot, 0):
            continue
        block, field = slot // table.block_size, f"{rows.field}[{row}]"
        if block not in owned[request]:
            _refuse(
                field,
                slot,
                f"in a block of request {request}, and block {block} is not",
            )
        others = [
            i for i, blocks in enumerate(owned) if block in blocks and i != request
        ]
        if others:
            _refuse(
                field,
                slot,
                f"in a block that request {request} shares with nobody, and block "
                f"{block} is also of requests {others}",
            )
