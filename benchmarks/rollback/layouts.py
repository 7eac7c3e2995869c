"""KV cache layouts of the payload benchmark, all bfloat16.

Each says where its slots lie twice: as planes, for our kernels, and as views to be
indexed with torch, ``view[index] = 0``, which is the obvious way to zero slots.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.rollback import vllm_chain
from vllm_mtp.kernels.planes import (
    LayoutError,
    SlotPlane,
    cpu_attention_planes,
    strided_planes,
)

BLOCK_SIZE = 64
NUM_HEADS = 8
HEAD_SIZE = 128
MLA_WIDTH = 576
ELEMENT_BYTES = 2
FILL_BYTE = 0x11
"""Content of a cache before it is scrubbed: any byte but zero."""

# A view of a cache and what to index it with.
Indexed = tuple[torch.Tensor, tuple[Any, ...]]


@dataclass(frozen=True)
class KVLayout:
    """One way to lay out a layer's cache.

    Attributes:
        name: In options and results.
        title: In words.
        slot_elements: Elements of one slot in one layer.
        view_cache: Views raw elements as a cache of that many blocks.
        planes: Planes of a cache, by its slot mapping.
        indexed: Views and indices of the given slots of a cache.
    """

    name: str
    title: str
    slot_elements: int
    view_cache: Callable[[torch.Tensor, int], torch.Tensor]
    planes: Callable[[torch.Tensor, torch.Tensor], list[SlotPlane]]
    indexed: Callable[[torch.Tensor, torch.Tensor], list[Indexed]]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in one layer."""
        return ELEMENT_BYTES * self.slot_elements

    def new_layer(self, num_blocks: int, device: torch.device) -> "LayerCache":
        """A layer's cache of memory that is not zero."""
        num_bytes = num_blocks * BLOCK_SIZE * self.slot_bytes
        storage = torch.full((num_bytes,), FILL_BYTE, dtype=torch.uint8, device=device)
        cache = self.view_cache(storage.view(torch.bfloat16), num_blocks)
        return LayerCache(storage, cache)


@dataclass(frozen=True)
class LayerCache:
    """The memory of one layer and the cache in it."""

    # [num_bytes] uint8
    storage: torch.Tensor
    cache: torch.Tensor


def layouts_for(device: torch.device) -> tuple[list[KVLayout], dict[str, str]]:
    """Layouts to measure on a device.

    Returns:
        The layouts, and why others are left out, by name.
    """
    layouts = [MLA, NHD, HND]
    if device.type != "cpu":
        return layouts, {CPU_BLOCK_MAJOR: "vLLM uses it on CPUs only"}
    isa = vllm_chain.cpu_packing(torch.bfloat16, BLOCK_SIZE, HEAD_SIZE)
    try:
        return [*layouts, cpu_block_major(isa)], {}
    except LayoutError as problem:
        return layouts, {CPU_BLOCK_MAJOR: str(problem)}


def _strided(cache: torch.Tensor, slot_mapping: torch.Tensor) -> list[SlotPlane]:
    return strided_planes(
        cache,
        block_dim=0,
        slot_dim=-2,
        slot_mapping=slot_mapping,
        num_null_slots=BLOCK_SIZE,
    )


def _rows(cache: torch.Tensor, slots: torch.Tensor) -> list[Indexed]:
    return [(cache.view(-1, MLA_WIDTH), (slots,))]


def _heads(cache: torch.Tensor, slots: torch.Tensor) -> list[Indexed]:
    return [(cache, (slots // BLOCK_SIZE, slice(None), slots % BLOCK_SIZE))]


MLA = KVLayout(
    name="mla",
    title=f"MLA, {MLA_WIDTH} wide",
    slot_elements=MLA_WIDTH,
    view_cache=lambda raw, num_blocks: raw.view(num_blocks, BLOCK_SIZE, MLA_WIDTH),
    planes=_strided,
    indexed=_rows,
)
# vLLM's shape of a cache is [num_blocks, num_heads, block_size, keys and values].
NHD = KVLayout(
    name="nhd",
    title=f"NHD, {NUM_HEADS} heads x {HEAD_SIZE}, K and V",
    slot_elements=NUM_HEADS * 2 * HEAD_SIZE,
    view_cache=lambda raw, num_blocks: raw.view(
        num_blocks, BLOCK_SIZE, NUM_HEADS, 2 * HEAD_SIZE
    ).transpose(1, 2),
    planes=_strided,
    indexed=_heads,
)
HND = KVLayout(
    name="hnd",
    title=f"HND, {NUM_HEADS} heads x {HEAD_SIZE}, K and V",
    slot_elements=NUM_HEADS * 2 * HEAD_SIZE,
    view_cache=lambda raw, num_blocks: raw.view(
        num_blocks, NUM_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE
    ),
    planes=_strided,
    indexed=_heads,
)
CPU_BLOCK_MAJOR = "cpu_block_major"


def cpu_block_major(isa: str) -> KVLayout:
    """Layout of vLLM's CPU attention, keys and values packed for ``isa``.

    Raises:
        LayoutError: The packing is not known.
    """

    def planes(cache: torch.Tensor, slot_mapping: torch.Tensor) -> list[SlotPlane]:
        return cpu_attention_planes(
            cache, isa=isa, slot_mapping=slot_mapping, num_null_slots=BLOCK_SIZE
        )

    layout = KVLayout(
        name=CPU_BLOCK_MAJOR,
        title=f"CPU block-major ({isa}), {NUM_HEADS} heads x {HEAD_SIZE}, K and V",
        slot_elements=NUM_HEADS * 2 * HEAD_SIZE,
        view_cache=HND.view_cache,
        planes=planes,
        indexed=_packed_for_amx if isa == "amx" else _packed_for_vectors,
    )
    probe = layout.new_layer(1, torch.device("cpu"))
    layout.planes(probe.cache, torch.zeros(1, dtype=torch.int64))
    return layout


def _packed_for_vectors(cache: torch.Tensor, slots: torch.Tensor) -> list[Indexed]:
    """Keys ``[D, block_size]`` and values ``[block_size, D]`` of each head."""
    keys = _half(cache, 0, HEAD_SIZE, BLOCK_SIZE)
    values = _half(cache, 1, BLOCK_SIZE, HEAD_SIZE)
    blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    every = slice(None)
    return [
        (keys, (blocks, every, every, offsets)),
        (values, (blocks, every, offsets)),
    ]


def _packed_for_amx(cache: torch.Tensor, slots: torch.Tensor) -> list[Indexed]:
    """Keys ``[t/16, D/2, 16, 2]`` and values ``[D/16, t/2, 16, 2]`` of each head."""
    keys = _half(cache, 0, BLOCK_SIZE // 16, HEAD_SIZE // 2, 16, 2)
    values = _half(cache, 1, HEAD_SIZE // 16, BLOCK_SIZE // 2, 16, 2)
    blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    every = slice(None)
    return [
        (keys, (blocks, every, offsets // 16, every, offsets % 16)),
        (values, (blocks, every, every, offsets // 2, every, offsets % 2)),
    ]


def _half(cache: torch.Tensor, number: int, *shape: int) -> torch.Tensor:
    """Keys (0) or values (1) of every head of every block, in a shape."""
    return cache.view(cache.shape[0], NUM_HEADS, 2, *shape)[:, :, number]
