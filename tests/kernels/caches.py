"""Random KV caches of every layout, and the comparison of what was scrubbed.

What must be zero is found by indexing the caches as tensors, not with planes, so that
a wrong plane and a wrong kernel both show.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from tests.kernels.plans import MAX_DRAFT_LENGTH
from vllm_mtp.kernels import triton_ops
from vllm_mtp.kernels.planes import (
    SlotPlane,
    cpu_attention_planes,
    plane_table,
    strided_planes,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
GUARD_BYTES = 16
MAX_CACHE_BYTES = 2**21
MAX_SCRUBBED_REQUESTS = 4 if triton_ops.INTERPRETED else 12


class Shape(NamedTuple):
    """Sizes of one layer's cache."""

    num_blocks: int
    block_size: int
    num_heads: int
    head_size: int

    @property
    def num_elements(self) -> int:
        """Keys and values."""
        return 2 * self.num_blocks * self.block_size * self.num_heads * self.head_size


class Strided(NamedTuple):
    """A tensor that a layer keeps, and which of its dimensions are what."""

    cache: torch.Tensor
    block_dim: int
    slot_dim: int

    def planes(self, **where: object) -> list[SlotPlane]:
        return strided_planes(
            self.cache, block_dim=self.block_dim, slot_dim=self.slot_dim, **where
        )

    def zero(self, block: int, offset: int) -> None:
        dims = self.block_dim % self.cache.dim(), self.slot_dim % self.cache.dim()
        _as_integers(self.cache).movedim(dims, (0, 1))[block, offset] = 0


class Packed(NamedTuple):
    """A cache of vLLM's CPU attention, ``[blocks, heads, block_size, 2 * D]``."""

    cache: torch.Tensor
    isa: str

    def planes(self, **where: object) -> list[SlotPlane]:
        return cpu_attention_planes(self.cache, isa=self.isa, **where)

    def zero(self, block: int, offset: int) -> None:
        _, num_heads, block_size, content = self.cache.shape
        elements = _as_integers(self.cache)[block].view(num_heads, -1)
        head_size = content // 2
        values_start = block_size * head_size
        for d in range(head_size):
            key, value = self._places(d, offset, block_size, head_size)
            elements[:, key] = 0
            elements[:, values_start + value] = 0

    def _places(self, d: int, t: int, n: int, head_size: int) -> tuple[int, int]:
        if self.isa != "amx":
            return d * n + t, t * head_size + d
        key = t // 16 * 16 * head_size + d // 2 * 32 + t % 16 * 2 + d % 2
        value = d // 16 * 16 * n + t // 2 * 32 + d % 16 * 2 + t % 2
        return key, value


def _as_integers(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(INTEGERS[cache.element_size()])


Part = Strided | Packed


def _key_and_value(flat: torch.Tensor, s: Shape) -> list[Part]:
    shape = s.num_blocks, s.block_size, s.num_heads, s.head_size
    return [Strided(half.view(shape), 0, 1) for half in flat.chunk(2)]


def _keys_first(flat: torch.Tensor, s: Shape) -> list[Part]:
    shape = 2, s.num_blocks, s.block_size, s.num_heads, s.head_size
    return [Strided(flat.view(shape), 1, 2)]


def _blocks_first(flat: torch.Tensor, s: Shape) -> list[Part]:
    shape = s.num_blocks, 2, s.block_size, s.num_heads, s.head_size
    return [Strided(flat.view(shape), 0, 2)]


def _hnd(flat: torch.Tensor, s: Shape) -> list[Part]:
    shape = s.num_blocks, s.num_heads, s.block_size, 2 * s.head_size
    return [Strided(flat.view(shape), 0, 2)]


def _nhd_by_stride(flat: torch.Tensor, s: Shape) -> list[Part]:
    """``[num_blocks, num_heads, block_size, content]`` over NHD memory, as vLLM has."""
    shape = s.num_blocks, s.block_size, s.num_heads, 2 * s.head_size
    return [Strided(flat.view(shape).permute(0, 2, 1, 3), 0, -2)]


def _heads_outermost(flat: torch.Tensor, s: Shape) -> list[Part]:
    shape = s.num_heads, s.num_blocks, 2, s.block_size, s.head_size
    return [Strided(flat.view(shape), 1, 3)]


def _latent_rows(flat: torch.Tensor, s: Shape) -> list[Part]:
    shape = s.num_blocks, s.block_size, 2 * s.num_heads * s.head_size
    return [Strided(flat.view(shape), 0, 1)]


def _part_of_a_row(flat: torch.Tensor, s: Shape) -> list[Part]:
    """The first bytes of each row; what is behind them belongs to somebody else."""
    shape = s.num_blocks, s.block_size, s.num_heads, 2 * s.head_size
    return [Strided(flat.view(shape)[..., : s.head_size], 0, 1)]


def _layers_between_blocks(flat: torch.Tensor, s: Shape) -> list[Part]:
    """Two layers whose blocks alternate in memory."""
    shape = s.num_blocks, 2, s.block_size, s.num_heads, s.head_size
    return [Strided(flat.view(shape)[:, layer], 0, 1) for layer in range(2)]


def _packed(isa: str) -> Callable[[torch.Tensor, Shape], list[Part]]:
    def parts(flat: torch.Tensor, s: Shape) -> list[Part]:
        shape = s.num_blocks, s.num_heads, s.block_size, 2 * s.head_size
        return [Packed(flat.view(shape), isa)]

    return parts


LAYOUTS: dict[str, Callable[[torch.Tensor, Shape], list[Part]]] = {
    "key and value apart": _key_and_value,
    "[2, blocks, ...]": _keys_first,
    "[blocks, 2, ...]": _blocks_first,
    "HND": _hnd,
    "NHD by stride": _nhd_by_stride,
    "heads outermost": _heads_outermost,
    "latent rows": _latent_rows,
    "part of a row": _part_of_a_row,
    "layers between blocks": _layers_between_blocks,
    "CPU vec": _packed("vec"),
    "CPU vec16": _packed("vec16"),
    "CPU amx": _packed("amx"),
}


class Layer(NamedTuple):
    """One layer's cache, before there is memory for it."""

    layout: str
    dtype: torch.dtype = torch.bfloat16
    num_heads: int = 2
    head_size: int = 8
    group: int = 0
    storage: int = 0


class Group(NamedTuple):
    """A cache group: its layers share slots and their mapping."""

    num_blocks: int = 4
    block_size: int = 16
    num_null_blocks: int = 1


@dataclass(frozen=True)
class Scrub:
    """A step to scrub, from which caches are made on any device."""

    layers: tuple[Layer, ...]
    groups: tuple[Group, ...] = (Group(),)
    # Rows and rejected rows of each request.
    requests: tuple[tuple[int, int], ...] = ((3, 2), (1, 0), (5, 1), (0, 0), (4, 4))
    count_dtype: torch.dtype = torch.int32
    odd_slots: bool = True
    """Whether some rows are padding or in the null block."""
    missing_slots: bool = False
    """Whether some rows have slots that do not exist."""
    seed: int = 0

    def shape_of(self, layer: Layer) -> Shape:
        group = self.groups[layer.group]
        heads = layer.num_heads, layer.head_size
        return Shape(group.num_blocks, group.block_size, *heads)


class Memory:
    """The tensors of a ``Scrub``, every byte of the caches and around them not zero.

    Attributes:
        storages: ``[num_bytes]`` uint8 each, with guard bytes around each cache.
        slot_mappings: one per group.
        planes: of all layers.
        query_start_loc: of the step.
        num_rejected_tokens: of the step.
    """

    def __init__(self, scrub: Scrub, device: str = "cpu") -> None:
        self._scrub, self._device = scrub, device
        self._rng = random.Random(scrub.seed)
        rows = [num_rows for num_rows, _ in scrub.requests]
        starts = torch.tensor([0, *rows]).cumsum(0)
        self.query_start_loc = starts.to(device, torch.int32)
        self.num_rejected_tokens = torch.tensor(
            [rejected for _, rejected in scrub.requests],
            dtype=scrub.count_dtype,
            device=device,
        )
        self.slot_mappings = [
            torch.tensor(self._slots(group, sum(rows)), device=device)
            for group in scrub.groups
        ]
        self.storages = self._allocate()
        self._parts = [
            (layer, self._parts_of(*place)) for layer, *place in self._places
        ]
        self.planes = [
            plane
            for layer, parts in self._parts
            for part in parts
            for plane in part.planes(
                slot_mapping=self.slot_mappings[layer.group],
                num_null_slots=self._first_slot(layer.group),
            )
        ]

    @property
    def arguments(self) -> tuple[object, ...]:
        """What ``scrub_rejected_slots`` takes."""
        return (
            self.storages,
            self.slot_mappings,
            plane_table(self.planes, torch.device(self._device)),
            self.query_start_loc,
            self.num_rejected_tokens,
        )

    def content(self) -> list[torch.Tensor]:
        """A copy of all storages."""
        return [storage.clone() for storage in self.storages]

    def expected(self) -> list[torch.Tensor]:
        """What the storages must hold afterwards; they themselves stay as they are."""
        before = self.content()
        for layer, slot in self.rejected_slots():
            parts = next(parts for other, parts in self._parts if other is layer)
            for part in parts:
                part.zero(*divmod(slot, self._scrub.groups[layer.group].block_size))
        after = self.content()
        for storage, old in zip(self.storages, before, strict=True):
            storage.copy_(old)
        return after

    def rejected_slots(self) -> Iterator[tuple[Layer, int]]:
        """Layer and slot of all that must be zeroed."""
        starts = self.query_start_loc.tolist()
        for layer, _ in self._parts:
            group = self._scrub.groups[layer.group]
            slots = self.slot_mappings[layer.group].tolist()
            for request, (_, rejected) in enumerate(self._scrub.requests):
                end = starts[request + 1]
                for slot in slots[end - rejected : end]:
                    num_slots = group.num_blocks * group.block_size
                    if max(self._first_slot(layer.group), 0) <= slot < num_slots:
                        yield layer, slot

    def _first_slot(self, index: int) -> int:
        group = self._scrub.groups[index]
        return group.num_null_blocks * group.block_size

    def _slots(self, group: Group, num_rows: int) -> list[int]:
        rng, num_slots = self._rng, group.num_blocks * group.block_size
        first = group.num_null_blocks * group.block_size
        free = rng.sample(range(first, num_slots), min(num_rows, num_slots - first))
        # More rows than slots: the rest has none.
        slots = free + [-1] * (num_rows - len(free))
        for row in range(num_rows):
            if self._scrub.odd_slots and rng.random() < 0.2:
                slots[row] = rng.choice([-1, rng.randrange(first) if first else -1])
            if self._scrub.missing_slots and rng.random() < 0.2:
                slots[row] = num_slots + rng.choice([0, 1, 7, 2**40])
        # A mapping is as long as the longest step.
        return [*slots, -1, max(first, 1) % num_slots]

    def _allocate(self) -> list[torch.Tensor]:
        self._places: list[tuple[Layer, int, int]] = []
        sizes: dict[int, int] = {}
        for layer in self._scrub.layers:
            size = layer.dtype.itemsize
            # Aligned no better than an element, and with somebody else's bytes before.
            padding = GUARD_BYTES + size * self._rng.randrange(4)
            start = sizes.get(layer.storage, 0) + padding
            start += -start % size
            self._places.append((layer, layer.storage, start))
            sizes[layer.storage] = (
                start + self._scrub.shape_of(layer).num_elements * size
            )
        generator = torch.Generator().manual_seed(self._scrub.seed)
        return [
            torch.randint(
                1, 256, (sizes.get(index, 0) + GUARD_BYTES,), generator=generator
            ).to(self._device, torch.uint8)
            for index in range(max(sizes, default=-1) + 1)
        ]

    def _parts_of(self, index: int, start: int) -> list[Part]:
        (layer,) = (p[0] for p in self._places if p[1:] == (index, start))
        shape = self._scrub.shape_of(layer)
        end = start + shape.num_elements * layer.dtype.itemsize
        flat = self.storages[index][start:end].view(layer.dtype)
        return LAYOUTS[layer.layout](flat, shape)


def scrubbed_by(backend, memory: Memory) -> list[torch.Tensor]:
    """Storages after a backend worked on them; they themselves stay as they are."""
    before = memory.content()
    backend.scrub_rejected_slots(*memory.arguments)
    after = memory.content()
    for storage, old in zip(memory.storages, before, strict=True):
        storage.copy_(old)
    return after


def assert_scrubbed_exactly(backend, memory: Memory) -> None:
    """Every byte of every storage: rejected slots zero, the others as they were."""
    mappings = [mapping.clone() for mapping in memory.slot_mappings]
    actual = scrubbed_by(backend, memory)
    for index, (after, expected, before) in enumerate(
        zip(actual, memory.expected(), memory.storages, strict=True)
    ):
        kept = (after != 0) & (expected == 0)
        assert not kept.any(), f"storage {index}: {int(kept.sum())} bytes were left"
        changed = (after != before) & (expected == before)
        assert not changed.any(), (
            f"storage {index}: {int(changed.sum())} bytes of others were changed"
        )
        assert torch.equal(after, expected), f"storage {index}"
    for mapping, old in zip(memory.slot_mappings, mappings, strict=True):
        assert torch.equal(mapping, old), "a slot mapping was written"


@st.composite
def scrubs(draw: st.DrawFn) -> Scrub:
    """Steps over up to five layers in up to two groups and three storages."""
    groups = tuple(draw(st.lists(_groups(), min_size=1, max_size=2)))
    layers = draw(st.lists(_layers(groups), max_size=5))
    rows = st.integers(0, MAX_DRAFT_LENGTH + 1)
    requests = draw(st.lists(rows, max_size=MAX_SCRUBBED_REQUESTS))
    return Scrub(
        layers=tuple(layers),
        groups=groups,
        requests=tuple((n, draw(st.integers(0, n))) for n in requests),
        count_dtype=draw(st.sampled_from((torch.int32, torch.int64))),
        odd_slots=draw(st.booleans()),
        missing_slots=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def _groups(draw: st.DrawFn) -> Group:
    num_blocks = draw(st.integers(2, 6))
    block_size = draw(st.sampled_from((1, 2, 3, 7, 16, 32, 48, 64, 2144)))
    return Group(num_blocks, block_size, draw(st.integers(0, 1)))


@st.composite
def _layers(draw: st.DrawFn, groups: tuple[Group, ...]) -> Layer:
    index = draw(st.integers(0, len(groups) - 1))
    layout = draw(st.sampled_from(sorted(LAYOUTS)))
    head_sizes: tuple[int, ...] = (1, 3, 8, 16, 80)
    dtypes = DTYPES
    if layout == "CPU amx":
        head_sizes, dtypes = (32, 96), DTYPES[1:]
        if groups[index].block_size % 16:
            layout = "CPU vec"
    layer = Layer(
        layout=layout,
        dtype=draw(st.sampled_from(dtypes)),
        num_heads=draw(st.integers(1, 3)),
        head_size=draw(st.sampled_from(head_sizes)),
        group=index,
        storage=draw(st.integers(0, 2)),
    )
    shape = Shape(*groups[index][:2], layer.num_heads, layer.head_size)
    if shape.num_elements * layer.dtype.itemsize > MAX_CACHE_BYTES:
        smallest = 32 if layout == "CPU amx" else 3
        return layer._replace(num_heads=1, head_size=smallest)
    return layer
