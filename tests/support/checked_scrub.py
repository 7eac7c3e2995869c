"""Checked mode of the payload rollback: addresses, slots and who owns their blocks."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from tests.support.checks import (
    check_dense,
    check_length,
    check_no_alias,
    check_rejected,
    extent,
    refuse,
)
from vllm_mtp.kernels.planes import NUM_COLUMNS, SlotPlane, planes_of_table
from vllm_mtp.kernels.reference import PADDING_SLOT

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
    check_dense("planes", planes, (torch.int64,), device, dims=2)
    if planes.shape[1] != NUM_COLUMNS:
        refuse("planes.shape[1]", planes.shape[1], f"{NUM_COLUMNS}")
    storages = {f"kv_storages[{i}]": t for i, t in enumerate(kv_storages)}
    mappings = {f"slot_mappings[{i}]": t for i, t in enumerate(slot_mappings)}
    counts = {
        "query_start_loc": query_start_loc,
        "num_rejected_tokens": num_rejected_tokens,
    }
    for name, storage in storages.items():
        check_dense(name, storage, (torch.uint8,), device)
    starts, rejected = check_rejected(counts, device, num_draft_tokens)
    for name, mapping in mappings.items():
        check_dense(name, mapping, (torch.int64,), device)
        check_length(name, mapping, starts[-1], "the step's rows")
    inputs = {"planes": planes, **mappings, **counts}
    for name, storage in storages.items():
        check_no_alias({name: storage}, inputs)

    of_mapping: dict[int, list[SlotPlane]] = {t.data_ptr(): [] for t in slot_mappings}
    for index, plane in enumerate(planes_of_table(planes)):
        _check_plane(f"planes[{index}]", plane, kv_storages, of_mapping)
        of_mapping[plane.slot_mapping_address].append(plane)
    for index, (name, mapping) in enumerate(mappings.items()):
        rows = _Rows(name, mapping[: starts[-1]].tolist(), starts, rejected)
        first_slot = _check_slots(rows, of_mapping[mapping.data_ptr()])
        if block_tables is not None:
            _check_blocks(rows, first_slot, block_tables[index])


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


def _check_plane(
    field: str,
    plane: SlotPlane,
    kv_storages: Sequence[torch.Tensor],
    mapping_addresses: dict[int, list[SlotPlane]],
) -> None:
    if plane.slot_mapping_address not in mapping_addresses:
        refuse(
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
            refuse(f"{field}.{dividend}", value, f"a multiple of {divisor} = {unit}")
    for name in ("count_0", "count_1", "count_2", "chunk_bytes"):
        if getattr(plane, name) < 1:
            refuse(f"{field}.{name}", getattr(plane, name), "1 or more")
    if plane.vector_bytes not in (1, 2, 4, 8, 16):
        refuse(f"{field}.vector_bytes", plane.vector_bytes, "1, 2, 4, 8 or 16")
    for name in BYTE_FIELDS:
        if getattr(plane, name) % plane.vector_bytes:
            refuse(
                f"{field}.{name}",
                getattr(plane, name),
                f"a multiple of vector_bytes = {plane.vector_bytes}",
            )
    extents = [extent(storage) for storage in kv_storages]
    start, end = plane.base_address, plane.end_address
    if not any(first <= start and end <= last for first, last in extents):
        refuse(
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
            refuse(field, slot, f"{PADDING_SLOT}, or a slot below {num_slots}")
        if slot < max(first_slot, 0):
            continue
        other = row_of.setdefault(slot, row)
        if other != row:
            refuse(
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
            refuse(
                field,
                slot,
                f"in a block of request {request}, and block {block} is not",
            )
        others = [
            i for i, blocks in enumerate(owned) if block in blocks and i != request
        ]
        if others:
            refuse(
                field,
                slot,
                f"in a block that request {request} shares with nobody, and block "
                f"{block} is also of requests {others}",
            )
