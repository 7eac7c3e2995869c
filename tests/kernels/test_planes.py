"""Planes: how a cache becomes rows of the table."""

import pytest
import torch
from hypothesis import given

from tests.kernels.caches import Memory, scrubs
from tests.kernels.plans import examples
from vllm_mtp.kernels.planes import (
    NUM_COLUMNS,
    LayoutError,
    SlotPlane,
    cpu_attention_planes,
    plane_table,
    planes_of_table,
    strided_planes,
)
from vllm_mtp.kernels.reference import byte_offsets

SLOTS = torch.zeros(1, dtype=torch.int64)


def plane_of(cache: torch.Tensor, block_dim: int = 0, slot_dim: int = 1) -> SlotPlane:
    (plane,) = strided_planes(
        cache, block_dim=block_dim, slot_dim=slot_dim, slot_mapping=SLOTS
    )
    return plane


def levels_of(plane: SlotPlane) -> list[tuple[int, int]]:
    return [
        (plane.count_0, plane.stride_0),
        (plane.count_1, plane.stride_1),
        (plane.count_2, plane.stride_2),
    ]


UNUSED = (1, 0)


def test_a_token_major_cache_is_one_chunk_per_slot() -> None:
    plane = plane_of(torch.zeros(5, 16, 4, 32, dtype=torch.bfloat16))
    assert plane.chunk_bytes == plane.slot_bytes == 4 * 32 * 2
    assert levels_of(plane) == [UNUSED] * 3
    assert plane.slot_stride == plane.chunk_bytes
    assert plane.block_stride == 16 * plane.chunk_bytes
    assert plane.num_slots == 80


def test_a_head_major_cache_has_a_chunk_per_head() -> None:
    plane = plane_of(torch.zeros(5, 4, 16, 32, dtype=torch.bfloat16), slot_dim=2)
    assert plane.chunk_bytes == 64
    assert levels_of(plane) == [(4, 16 * 64), UNUSED, UNUSED]
    assert plane.num_chunks == 4


def test_keys_and_values_in_one_tensor_are_one_plane_of_two_chunks() -> None:
    plane = plane_of(torch.zeros(2, 5, 16, 4, 32), block_dim=1, slot_dim=2)
    assert levels_of(plane) == [(2, 5 * 16 * 4 * 32 * 4), UNUSED, UNUSED]
    assert plane.chunk_bytes == 4 * 32 * 4


def test_dimensions_that_continue_one_another_become_one_level() -> None:
    cache = torch.zeros(5, 16, 2, 3, 8, dtype=torch.uint8)[..., :4]
    plane = plane_of(cache)
    assert plane.chunk_bytes == 4
    assert levels_of(plane) == [(6, 8), UNUSED, UNUSED]


def test_negative_dimensions_count_from_the_end() -> None:
    cache = torch.zeros(5, 4, 16, 32)
    assert plane_of(cache, 0, -2) == plane_of(cache, 0, 2)


def test_dimensions_of_one_element_do_not_count() -> None:
    cache = torch.zeros(5, 1, 16, 1, 1, 32)
    assert levels_of(plane_of(cache, slot_dim=2)) == [UNUSED] * 3


def test_a_slot_in_four_strided_dimensions_is_refused() -> None:
    cache = torch.zeros(2, 3, 4, 4, 4, 8, dtype=torch.uint8)
    with pytest.raises(LayoutError, match="4 strided dimensions"):
        plane_of(cache[:, :, ::2, ::2, ::2, ::2])


def test_three_strided_dimensions_are_not_refused() -> None:
    cache = torch.zeros(2, 3, 4, 4, 8, dtype=torch.uint8)[:, :, ::2, ::2, ::2]
    assert levels_of(plane_of(cache)) == [(4, 2), (2, 16), (2, 64)]


@pytest.mark.parametrize(
    ("head_size", "offset", "vector_bytes"),
    [(8, 0, 16), (8, 1, 2), (80, 0, 16), (4, 0, 8), (6, 0, 4), (3, 0, 2), (8, 4, 8)],
)
def test_the_access_is_as_wide_as_chunk_stride_and_address_allow(
    head_size, offset, vector_bytes
) -> None:
    flat = torch.zeros(2 * 16 * head_size + 32, dtype=torch.bfloat16)
    assert flat.data_ptr() % 16 == 0
    cache = flat[offset : offset + 32 * head_size].view(2, 16, head_size)
    assert plane_of(cache).vector_bytes == vector_bytes


def test_odd_bytes_are_accessed_one_by_one() -> None:
    assert plane_of(torch.zeros(2, 16, 3, dtype=torch.uint8)).vector_bytes == 1


def test_an_unknown_packing_is_refused_by_name() -> None:
    cache = torch.zeros(2, 2, 32, 64)
    with pytest.raises(LayoutError, match="'neon'; known: vec, vec16, amx"):
        cpu_attention_planes(cache, isa="neon", slot_mapping=SLOTS)


def test_the_table_keeps_planes_that_occur_twice_once_and_their_order() -> None:
    planes = [plane_of(torch.zeros(5, 16, n)) for n in (4, 8, 12)]
    table = plane_table([*planes, planes[0], *planes], torch.device("cpu"))
    assert table.dtype == torch.int64
    assert table.shape == (3, NUM_COLUMNS)
    assert planes_of_table(table) == planes


def test_a_table_of_nothing_has_its_columns() -> None:
    table = plane_table([], torch.device("cpu"))
    assert table.shape == (0, NUM_COLUMNS)
    assert planes_of_table(table) == []


@examples(80)
@given(scrub=scrubs())
def test_the_end_address_is_one_past_the_last_byte_of_any_slot(scrub) -> None:
    for plane in Memory(scrub).planes:
        last = plane.num_slots - 1
        slots = torch.arange(max(0, last - plane.block_size), last + 1)
        ends = plane.base_address + int(byte_offsets(plane, slots).max()) + 1
        assert ends == plane.end_address


@examples(40)
@given(scrub=scrubs())
def test_no_byte_belongs_to_two_slots_of_a_plane(scrub) -> None:
    for plane in Memory(scrub).planes:
        slots = torch.arange(min(plane.num_slots, 100))
        offsets = byte_offsets(plane, slots)
        assert len(offsets) == len(slots) * plane.slot_bytes
        assert len(offsets.unique()) == len(offsets)
