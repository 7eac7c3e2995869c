"""Payload rollback: every backend, every layout, every byte of the storages."""

import pytest
import torch
from hypothesis import given

from tests.kernels.caches import (
    DTYPES,
    LAYOUTS,
    Group,
    Layer,
    Memory,
    Scrub,
    assert_scrubbed_exactly,
    scrubs,
)
from tests.kernels.plans import examples
from tests.support.checked import check_scrub_plan
from vllm_mtp.kernels.planes import strided_planes


@examples(120)
@given(scrub=scrubs())
def test_exactly_the_rejected_slots_are_zeroed(backend, scrub) -> None:
    assert_scrubbed_exactly(backend, Memory(scrub, backend.device_type))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_is_scrubbed_in_each_dtype(backend, layout) -> None:
    # AMX packs pairs of elements of one or two bytes, 32 of them together.
    dtypes = DTYPES[1:] if layout == "CPU amx" else DTYPES
    head_size = 96 if layout == "CPU amx" else 80
    for dtype in dtypes:
        layers = Layer(layout, dtype, head_size=32), Layer(layout, dtype, 1, head_size)
        memory = Memory(Scrub(layers), backend.device_type)
        assert list(memory.rejected_slots())
        assert_scrubbed_exactly(backend, memory)


@pytest.mark.parametrize("block_size", [1, 16, 2144])
def test_blocks_may_have_any_size(backend, block_size) -> None:
    layers = Layer("HND", head_size=3), Layer("key and value apart")
    scrub = Scrub(layers, (Group(30 if block_size == 1 else 3, block_size),))
    assert_scrubbed_exactly(backend, Memory(scrub, backend.device_type))


def test_layers_of_two_groups_in_one_storage_and_in_another(backend) -> None:
    layers = (
        Layer("HND", torch.float32, group=0, storage=0),
        Layer("latent rows", torch.bfloat16, group=1, storage=0),
        Layer("key and value apart", torch.float16, group=0, storage=1),
        Layer("CPU vec", torch.float32, group=1, storage=2),
    )
    scrub = Scrub(layers, (Group(5, 16), Group(9, 7, 0)))
    memory = Memory(scrub, backend.device_type)
    assert {layer.group for layer, _ in memory.rejected_slots()} == {0, 1}
    assert_scrubbed_exactly(backend, memory)


@pytest.mark.parametrize(
    "scrub",
    [
        Scrub((Layer("HND"),), requests=()),
        Scrub(()),
        Scrub((Layer("HND"),), requests=((3, 0), (0, 0), (2, 0))),
    ],
    ids=["no requests", "no layers", "nothing rejected"],
)
def test_without_work_nothing_is_touched(backend, scrub) -> None:
    memory = Memory(scrub, backend.device_type)
    assert list(memory.rejected_slots()) == []
    assert_scrubbed_exactly(backend, memory)


def test_padding_the_null_block_and_missing_slots_are_left_alone(backend) -> None:
    scrub = Scrub((Layer("HND"), Layer("CPU vec")), requests=((6, 6),), odd_slots=False)
    memory = Memory(scrub, backend.device_type)
    odd = [-1, 0, 15, 64, 65, 2**40]
    memory.slot_mappings[0][:6] = torch.tensor(odd, device=backend.device_type)
    assert list(memory.rejected_slots()) == []
    assert_scrubbed_exactly(backend, memory)


def test_a_count_above_a_requests_rows_reaches_no_other_request(backend) -> None:
    scrub = Scrub((Layer("HND"),), requests=((4, 0), (3, 3)), odd_slots=False)
    memory = Memory(scrub, backend.device_type)
    *others, starts, counts = memory.arguments
    backend.scrub_rejected_slots(*others, starts, counts + 4 * (counts > 0))
    (storage,) = memory.storages
    assert int((storage == 0).sum()) == 3 * memory.planes[0].slot_bytes


def test_layers_that_share_a_cache_are_scrubbed_once(backend) -> None:
    memory = Memory(Scrub((Layer("HND"),)), backend.device_type)
    memory.planes *= 3
    assert len(memory.arguments[2]) == 1
    assert_scrubbed_exactly(backend, memory)


@pytest.mark.parametrize("chunk", [1, 2, 4, 8, 16, 48, 4096])
def test_every_access_width_is_used(backend, chunk) -> None:
    """A chunk and its alignment decide the width: 1, 2, 4, 8 or 16 bytes."""
    layer, group = Layer("HND"), Group(4, 8, num_null_blocks=0)
    scrub = Scrub((layer,), (group,), odd_slots=False)
    memory = Memory(scrub, backend.device_type)
    storage = torch.full((1 << 18,), 7, dtype=torch.uint8, device=backend.device_type)
    rows = storage[-storage.data_ptr() % 16 :][: 32 * 2 * chunk].view(4, 8, 2, chunk)
    memory.storages = [storage]
    memory.planes = strided_planes(
        rows[:, :, 0], block_dim=0, slot_dim=1, slot_mapping=memory.slot_mappings[0]
    )
    assert memory.planes[0].vector_bytes == min(chunk & -chunk, 16)
    slots = [slot for _, slot in memory.rejected_slots()]
    backend.scrub_rejected_slots(*memory.arguments)
    zero = (rows[:, :, 0] == 0).all(-1).flatten()
    assert zero.nonzero().flatten().tolist() == sorted(slots)
    assert int((storage == 0).sum()) == len(slots) * chunk


@examples(60)
@given(scrub=scrubs())
def test_the_checked_mode_lets_the_drawn_steps_pass(scrub) -> None:
    if not scrub.missing_slots:
        check_scrub_plan(*Memory(scrub).arguments)
