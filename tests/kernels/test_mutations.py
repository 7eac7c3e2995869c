"""Kernels broken on purpose: the comparisons of the other tests must see each."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.caches import Group, Layer, Memory, Scrub, assert_scrubbed_exactly
from tests.kernels.plans import (
    PADDING,
    Request,
    Step,
    assert_metadata_equals_reference,
    decode,
    prefill,
)
from tests.support.checked import (
    BlockTable,
    InvalidRollbackPlanError,
    check_scrub_plan,
)
from vllm_mtp.kernels import reference
from vllm_mtp.kernels.planes import planes_of_table

STEP = Step(
    (
        decode(4, 2),
        prefill(3),
        Request(3, 2, (5, None, 6)),
        PADDING,
        decode(3, 4),
        Request(3, 2, ()),
    ),
    num_tail_rows=3,
    num_extra_rows=2,
)
SCRUB = Scrub(
    (Layer("HND", torch.float32), Layer("CPU vec", storage=1), Layer("latent rows")),
    odd_slots=False,
)


def metadata_backend(mutate: Callable[..., None]) -> SimpleNamespace:
    """The reference, with something done to its outputs afterwards."""

    def rollback_metadata(plan, per_request, slot_mapping) -> None:
        reference.rollback_metadata(plan, per_request, slot_mapping)
        mutate(plan, per_request, slot_mapping)

    return SimpleNamespace(rollback_metadata=rollback_metadata)


def pads_one_row_too_few(plan, per_request, slots) -> None:
    row = int(per_request[4, 0]) + 1
    slots[row] = plan.slot_mapping[row]


def pads_the_last_valid_row(plan, per_request, slots) -> None:
    slots[int(per_request[4, 0])] = -1


def is_one_row_off(plan, per_request, slots) -> None:
    per_request[4] += 1


def takes_the_first_token(plan, per_request, slots) -> None:
    per_request[0, 0] = plan.sampled_token_ids[0, 0]


def stops_at_a_hole(plan, per_request, slots) -> None:
    per_request[1, 2] = 1


def samples_where_discarded(plan, per_request, slots) -> None:
    per_request[0, 1] = plan.sampled_token_ids[1, 0]


def forgets_the_tail(plan, per_request, slots) -> None:
    slots[-2:] = -999


def writes_behind_the_end(plan, per_request, slots) -> None:
    slots.as_strided((len(slots) + 1,), (1,))[-1] = -1


def writes_before_the_start(plan, per_request, slots) -> None:
    start = per_request.storage_offset() - 1
    per_request.as_strided((1,), (1,), start)[0] = 0


def leaves_a_request_out(plan, per_request, slots) -> None:
    per_request[:, 3] = -999


def shortens_by_one_too_few(plan, per_request, slots) -> None:
    per_request[5, 0] += 1


def writes_an_input(plan, per_request, slots) -> None:
    plan.seq_lens[0] -= 1


METADATA_MUTATIONS = (
    pads_one_row_too_few,
    pads_the_last_valid_row,
    is_one_row_off,
    takes_the_first_token,
    stops_at_a_hole,
    samples_where_discarded,
    forgets_the_tail,
    writes_behind_the_end,
    writes_before_the_start,
    leaves_a_request_out,
    shortens_by_one_too_few,
    writes_an_input,
)


@pytest.mark.parametrize("mutate", METADATA_MUTATIONS, ids=lambda m: m.__name__)
def test_a_broken_metadata_kernel_is_caught(mutate) -> None:
    with pytest.raises(AssertionError):
        assert_metadata_equals_reference(metadata_backend(mutate), STEP)


def test_the_unbroken_metadata_kernel_passes() -> None:
    assert_metadata_equals_reference(metadata_backend(lambda *outputs: None), STEP)


Planes = list


def scrub_backend(
    change_planes: Callable[[Planes], Planes] = lambda planes: planes,
    change_rows: Callable[..., tuple[torch.Tensor, torch.Tensor]] = lambda *rows: rows,
) -> SimpleNamespace:
    """The reference, with another table or other rows than it was given."""

    def scrub_rejected_slots(storages, mappings, table, starts, counts) -> None:
        planes = change_planes(planes_of_table(table))
        rows = [[getattr(p, n) for n in p.__slots__] for p in planes]
        table = torch.tensor(rows, dtype=torch.int64)
        reference.scrub_rejected_slots(
            storages, mappings, table, *change_rows(starts, counts)
        )

    return SimpleNamespace(scrub_rejected_slots=scrub_rejected_slots)


def with_first_plane(**change: Callable[[int], int]) -> Callable[[Planes], Planes]:
    def changed(planes: Planes) -> Planes:
        values = {name: f(getattr(planes[0], name)) for name, f in change.items()}
        return [replace(planes[0], **values), *planes[1:]]

    return changed


def ends_earlier(starts: torch.Tensor) -> torch.Tensor:
    """As if the last row of each request were not its own."""
    return (starts - 1).clamp(min=0)


SCRUB_MUTATIONS = {
    "wrong layer stride": scrub_backend(
        with_first_plane(base_address=lambda address: address + 4)
    ),
    "wrong block stride": scrub_backend(
        with_first_plane(block_stride=lambda stride: stride - 4)
    ),
    "wrong slot stride": scrub_backend(
        with_first_plane(slot_stride=lambda stride: stride // 2)
    ),
    "one head too few": scrub_backend(
        with_first_plane(count_0=lambda count: count - 1)
    ),
    "one byte too many": scrub_backend(
        with_first_plane(chunk_bytes=lambda count: count + 1)
    ),
    "one byte too few": scrub_backend(
        with_first_plane(chunk_bytes=lambda count: count - 1)
    ),
    "last layer forgotten": scrub_backend(lambda planes: planes[:-1]),
    "values forgotten": scrub_backend(lambda planes: [planes[0], planes[1], planes[3]]),
    "first rejected row kept": scrub_backend(
        change_rows=lambda starts, counts: (starts, (counts - 1).clamp(min=0))
    ),
    "last committed row zeroed": scrub_backend(
        change_rows=lambda starts, counts: (starts, counts + (counts == 2).int())
    ),
    "one row too early": scrub_backend(
        change_rows=lambda starts, counts: (ends_earlier(starts), counts)
    ),
}


@pytest.mark.parametrize("name", SCRUB_MUTATIONS)
def test_a_broken_scrub_is_caught(name) -> None:
    with pytest.raises(AssertionError):
        assert_scrubbed_exactly(SCRUB_MUTATIONS[name], Memory(SCRUB))


def test_the_unbroken_scrub_passes() -> None:
    assert_scrubbed_exactly(scrub_backend(), Memory(SCRUB))


def test_a_scrub_that_forgets_the_null_block_is_caught() -> None:
    memory = Memory(SCRUB)
    memory.slot_mappings[0][2] = 5  # A rejected row, in block 0.
    assert_scrubbed_exactly(reference, memory)
    broken = scrub_backend(with_first_plane(first_slot=lambda slot: 0))
    with pytest.raises(AssertionError, match="bytes of others were changed"):
        assert_scrubbed_exactly(broken, memory)


def test_a_scrub_of_slots_that_do_not_exist_is_caught() -> None:
    memory = Memory(replace(SCRUB, layers=(Layer("HND"), Layer("HND"))))
    memory.slot_mappings[0][2] = 4 * 16  # Behind the last block: the other layer's.
    assert_scrubbed_exactly(reference, memory)
    broken = scrub_backend(with_first_plane(num_slots=lambda slots: slots + 16))
    with pytest.raises(AssertionError, match="bytes of others were changed"):
        assert_scrubbed_exactly(broken, memory)


def test_a_scrub_after_the_rows_were_padded_is_caught() -> None:
    """The order matters: padding first hides the slots."""

    def scrub_rejected_slots(storages, mappings, table, starts, counts) -> None:
        kept = [mapping.clone() for mapping in mappings]
        for mapping in mappings:
            reference.pad_rejected_rows(mapping, starts, counts)
        reference.scrub_rejected_slots(storages, mappings, table, starts, counts)
        for mapping, old in zip(mappings, kept, strict=True):
            mapping.copy_(old)

    broken = SimpleNamespace(scrub_rejected_slots=scrub_rejected_slots)
    with pytest.raises(AssertionError, match="bytes were left"):
        assert_scrubbed_exactly(broken, Memory(SCRUB))


def test_a_rejected_slot_in_a_shared_block_is_refused_before_it_is_zeroed() -> None:
    """No kernel can see this one: the slot is valid, its block has two readers."""
    group = Group(num_blocks=6, block_size=4)
    memory = Memory(Scrub((Layer("HND"),), (group,), requests=((2, 1), (2, 1))))
    slots = torch.tensor([8, 9, 12, 13])
    memory.slot_mappings[0][:4] = slots
    num_blocks = torch.tensor([1, 2], dtype=torch.int32)
    own = BlockTable(torch.tensor([[2, 0], [3, 4]], dtype=torch.int32), num_blocks, 4)
    check_scrub_plan(*memory.arguments, block_tables=[own])
    shared = own._replace(block_ids=torch.tensor([[2, 0], [3, 2]], dtype=torch.int32))
    with pytest.raises(InvalidRollbackPlanError, match=r"also of requests \[1\]"):
        check_scrub_plan(*memory.arguments, block_tables=[shared])
