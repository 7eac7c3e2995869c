"""Where a KV slot's bytes lie: every cache layout as a table of strided planes.

A *slot* is one token's place in a KV cache, numbered ``block * block_size + offset``.
Its bytes may be scattered: keys and values apart, one piece per head, or, in a cache
packed for matrix units, two bytes here and two bytes there. A *plane* describes all
slots of one regular pattern::

    block, offset   = divmod(slot, block_size)
    group, in_group = divmod(offset, group_size)
    address = base_address + block * block_stride
                           + group * group_stride + in_group * slot_stride
                           + i_0 * stride_0 + i_1 * stride_1 + i_2 * stride_2
    for i_0 < count_0, i_1 < count_1, i_2 < count_2: chunk_bytes bytes at address

All strides are bytes, so the element type does not matter. A kernel that knows this
formula knows every layout; one row of the table per plane, one launch for all layers.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace

import torch

MAX_LEVELS = 3
"""Strided dimensions a plane can have beside its blocks and slots."""


class LayoutError(ValueError):
    """A cache's layout cannot be written as planes."""


@dataclass(frozen=True, slots=True)
class SlotPlane:
    """One row of the table; the fields, in this order, are its int64 columns."""

    base_address: int
    """Address of the first byte of slot 0."""
    slot_mapping_address: int
    """Address of the int64 slot of each row of the step, of this cache's group."""
    first_slot: int
    """Slots below belong to the null block and are never touched."""
    num_slots: int
    """Slots of the cache; those at or above do not exist and are never touched."""
    block_size: int
    """Slots per block."""
    block_stride: int
    group_size: int
    """Slots that lie ``slot_stride`` apart; ``block_size`` where all of them do."""
    group_stride: int
    slot_stride: int
    count_0: int
    stride_0: int
    count_1: int
    stride_1: int
    count_2: int
    stride_2: int
    chunk_bytes: int
    """Bytes that lie together."""
    vector_bytes: int
    """Widest aligned access that divides every chunk: 1, 2, 4, 8 or 16."""

    @property
    def num_chunks(self) -> int:
        return self.count_0 * self.count_1 * self.count_2

    @property
    def slot_bytes(self) -> int:
        return self.num_chunks * self.chunk_bytes

    @property
    def end_address(self) -> int:
        """One past the last byte that the plane can touch."""
        num_blocks = self.num_slots // self.block_size
        return (
            self.base_address
            + (num_blocks - 1) * self.block_stride
            + (self.block_size // self.group_size - 1) * self.group_stride
            + (self.group_size - 1) * self.slot_stride
            + (self.count_0 - 1) * self.stride_0
            + (self.count_1 - 1) * self.stride_1
            + (self.count_2 - 1) * self.stride_2
            + self.chunk_bytes
        )


NUM_COLUMNS = len(SlotPlane.__dataclass_fields__)


def strided_planes(
    cache: torch.Tensor,
    *,
    block_dim: int,
    slot_dim: int,
    slot_mapping: torch.Tensor,
    num_null_slots: int = 0,
) -> list[SlotPlane]:
    """Plane of a cache whose blocks and slots are two of its dimensions.

    Covers the cache shapes of GPU backends: keys and values in one tensor or two,
    NHD or HND by stride, MLA's single latent row. Dimensions that lie together are
    merged, so a token-major cache becomes one chunk per slot.

    Args:
        cache: any shape and strides, e.g. ``[num_blocks, num_heads, block_size, D]``.
        block_dim: dimension of the blocks.
        slot_dim: dimension of a block's slots.
        slot_mapping: ``[max_num_tokens]`` int64; only its address is kept.
        num_null_slots: slots of the null block, at the start of the cache.

    Raises:
        LayoutError: more than three strided dimensions remain.
    """
    size = cache.element_size()
    levels = [
        (cache.shape[dim], cache.stride(dim) * size)
        for dim in range(cache.dim())
        if dim not in (block_dim % cache.dim(), slot_dim % cache.dim())
        and cache.shape[dim] > 1
    ]
    chunk_bytes, levels = _merge(size, levels)
    block_size = cache.shape[slot_dim]
    return [
        _plane(
            base_address=cache.data_ptr(),
            slot_mapping=slot_mapping,
            num_null_slots=num_null_slots,
            num_blocks=cache.shape[block_dim],
            block_size=block_size,
            block_stride=cache.stride(block_dim) * size,
            group=(block_size, 0),
            slot_stride=cache.stride(slot_dim) * size,
            levels=levels,
            chunk_bytes=chunk_bytes,
        )
    ]


def cpu_attention_planes(
    cache: torch.Tensor,
    *,
    isa: str,
    slot_mapping: torch.Tensor,
    num_null_slots: int = 0,
) -> list[SlotPlane]:
    """Planes of vLLM's CPU attention cache: keys and values packed for vector units.

    Each head of a block holds all keys, then all values. With ``D`` dimensions, block
    size ``N`` and slot ``t``, in elements from the start of the half::

        isa            key d of slot t                       value d of slot t
        vec, vec16     d*N + t                               t*D + d
        amx            t//16*16*D + d//2*32 + t%16*2 + d%2   d//16*16*N + t//2*32
                                                               + d%16*2 + t%2

    (read off the bytes that ``cpu_attn_reshape_and_cache`` of vLLM 0.32 changes; a
    test compares each of them again).

    Args:
        cache: ``[num_blocks, num_heads, block_size, 2 * D]``, contiguous blocks.
        isa: vLLM's name for the packing, from the attention layer.
        slot_mapping: ``[max_num_tokens]`` int64; only its address is kept.
        num_null_slots: slots of the null block, at the start of the cache.

    Raises:
        LayoutError: the packing is none of these, or vLLM has none for such heads.
    """
    num_blocks, num_heads, block_size, content = cache.shape
    size, head_size = cache.element_size(), content // 2
    half = block_size * head_size * size
    heads = (num_heads, cache.stride(1) * size)
    if isa in ("vec", "vec16"):
        keys = dict(
            group=(block_size, 0),
            slot_stride=size,
            levels=[(head_size, block_size * size), heads],
            chunk_bytes=size,
        )
        values = dict(
            group=(block_size, 0),
            slot_stride=head_size * size,
            levels=[heads],
            chunk_bytes=head_size * size,
        )
    elif isa == "amx":
        if head_size % 32 or size > 2:
            raise LayoutError(
                f"vLLM has no amx packing for heads of {head_size} elements of {size} "
                "bytes; it packs heads of 32, 64, ... elements of 1 or 2 bytes"
            )
        keys = dict(
            group=(16, 16 * head_size * size),
            slot_stride=2 * size,
            levels=[(head_size // 2, 32 * size), heads],
            chunk_bytes=2 * size,
        )
        values = dict(
            group=(2, 32 * size),
            slot_stride=size,
            levels=[(16, 2 * size), (head_size // 16, 16 * block_size * size), heads],
            chunk_bytes=size,
        )
    else:
        raise LayoutError(
            f"CPU attention packs its cache for {isa!r}; known: vec, vec16, amx"
        )
    return [
        _plane(
            base_address=cache.data_ptr() + offset,
            slot_mapping=slot_mapping,
            num_null_slots=num_null_slots,
            num_blocks=num_blocks,
            block_size=block_size,
            block_stride=cache.stride(0) * size,
            **pattern,  # type: ignore[arg-type]
        )
        for offset, pattern in ((0, keys), (half, values))
    ]


def plane_table(planes: Sequence[SlotPlane], device: torch.device) -> torch.Tensor:
    """``[num_planes, NUM_COLUMNS]`` int64 table of planes, on ``device``.

    Planes that occur twice (layers that share a cache) are kept once.
    """
    rows = [astuple(plane) for plane in dict.fromkeys(planes)]
    table = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), NUM_COLUMNS)
    return table.to(device)


def planes_of_table(table: torch.Tensor) -> list[SlotPlane]:
    """The planes of a table; waits for its device."""
    return [SlotPlane(*row) for row in table.tolist()]


def _plane(
    *,
    base_address: int,
    slot_mapping: torch.Tensor,
    num_null_slots: int,
    num_blocks: int,
    block_size: int,
    block_stride: int,
    group: tuple[int, int],
    slot_stride: int,
    levels: Sequence[tuple[int, int]],
    chunk_bytes: int,
) -> SlotPlane:
    if len(levels) > MAX_LEVELS:
        raise LayoutError(
            f"a slot lies in {len(levels)} strided dimensions (count, bytes): "
            f"{list(levels)}; at most {MAX_LEVELS} are known"
        )
    first, second, third = [*levels, *[(1, 0)] * (MAX_LEVELS - len(levels))]
    plane = SlotPlane(
        base_address=base_address,
        slot_mapping_address=slot_mapping.data_ptr(),
        first_slot=num_null_slots,
        num_slots=num_blocks * block_size,
        block_size=block_size,
        block_stride=block_stride,
        group_size=group[0],
        group_stride=group[1],
        slot_stride=slot_stride,
        count_0=first[0],
        stride_0=first[1],
        count_1=second[0],
        stride_1=second[1],
        count_2=third[0],
        stride_2=third[1],
        chunk_bytes=chunk_bytes,
        vector_bytes=1,
    )
    return replace(plane, vector_bytes=_widest_access(plane))


def _merge(
    chunk_bytes: int, levels: Iterable[tuple[int, int]]
) -> tuple[int, list[tuple[int, int]]]:
    """Merge dimensions that continue one another, innermost first."""
    merged: list[tuple[int, int]] = []
    for count, stride in sorted(levels, key=lambda level: level[1]):
        if not merged and stride == chunk_bytes:
            chunk_bytes *= count
        elif merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * count, merged[-1][1])
        else:
            merged.append((count, stride))
    return chunk_bytes, merged


def _widest_access(plane: SlotPlane) -> int:
    return math.gcd(
        16,
        plane.base_address,
        plane.block_stride,
        plane.group_stride,
        plane.slot_stride,
        plane.stride_0,
        plane.stride_1,
        plane.stride_2,
        plane.chunk_bytes,
    )
