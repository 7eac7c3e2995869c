"""The checked mode: what it refuses and in which words; else nothing changes."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.caches import Group, Layer, Memory, Scrub
from tests.kernels.greedy_steps import Outputs, Request, step_of
from tests.kernels.plans import PADDING, Step, decode, outputs_for, prefill
from tests.support.checked import (
    BlockTable,
    InvalidRollbackPlanError,
    check_greedy_step,
    check_pad_plan,
    check_rollback_plan,
    check_scrub_plan,
    checked,
)
from vllm_mtp.kernels import dispatch, reference, schemas
from vllm_mtp.kernels.planes import plane_table

STEP = Step((decode(3, 2), prefill(4), PADDING, decode(2, 3)), num_tail_rows=2)
"""Rows start at 0, 4, 8, 8 and end at 11."""


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def with_value(tensor: torch.Tensor, index: object, value: int) -> torch.Tensor:
    changed = tensor.clone()
    changed[index] = value
    return changed


BAD_PLANS: dict[str, tuple[Callable, str]] = {
    "tokens are floats": (
        lambda p: {"sampled_token_ids": p.sampled_token_ids.float()},
        "sampled_token_ids.dtype = torch.float32",
    ),
    "lengths are int64": (
        lambda p: {"seq_lens": p.seq_lens.long()},
        "seq_lens.dtype = torch.int64",
    ),
    "mask is int32": (
        lambda p: {"discarded": p.discarded.int()},
        "discarded.dtype = torch.int32",
    ),
    "slots are int32": (
        lambda p: {"slot_mapping": p.slot_mapping.int()},
        "slot_mapping.dtype = torch.int32",
    ),
    "another device": (
        lambda p: {"seq_lens": p.seq_lens.to("meta")},
        "seq_lens.device = meta",
    ),
    "one dimension of tokens": (
        lambda p: {"sampled_token_ids": p.sampled_token_ids[0]},
        "sampled_token_ids.dim() = 1",
    ),
    "no column of tokens": (
        lambda p: {"sampled_token_ids": p.sampled_token_ids[:, :0]},
        "sampled_token_ids.shape[1] = 0",
    ),
    "too few tokens": (
        lambda p: {"sampled_token_ids": p.sampled_token_ids[:3]},
        "sampled_token_ids.shape[0] = 3",
    ),
    "too few backup tokens": (
        lambda p: {"backup_next_token_ids": p.backup_next_token_ids[:3]},
        "backup_next_token_ids.shape[0] = 3",
    ),
    "too few starts": (
        lambda p: {"query_start_loc": p.query_start_loc[:4]},
        "query_start_loc.shape[0] = 4",
    ),
    "a gap between lengths": (
        lambda p: {"seq_lens": torch.ones(8, dtype=torch.int32)[::2]},
        "seq_lens.stride() = (2,)",
    ),
    "no vocabulary": (lambda p: {"vocab_size": 0}, "vocab_size = 0"),
    "the first row is not 0": (
        lambda p: {"query_start_loc": int32(1, 4, 8, 8, 11)},
        "query_start_loc[0] = 1",
    ),
    "starts decrease": (
        lambda p: {"query_start_loc": int32(0, 4, 3, 8, 11)},
        "query_start_loc[2] = 3",
    ),
    "more rows than slots": (
        lambda p: {"query_start_loc": int32(0, 4, 8, 8, 14)},
        "query_start_loc[4] = 14",
    ),
    "drafts decrease": (
        lambda p: {"cu_num_draft_tokens": int32(3, 2, 2, 4)},
        "cu_num_draft_tokens[1] = 2",
    ),
    "more drafts than rows": (
        lambda p: {"cu_num_draft_tokens": int32(4, 4, 4, 6)},
        "cu_num_draft_tokens[0] = 4",
    ),
    "drafts of a request without rows": (
        lambda p: {"cu_num_draft_tokens": int32(3, 3, 4, 6)},
        "cu_num_draft_tokens[2] = 4",
    ),
    "more sampled than drafts": (
        lambda p: {"cu_num_draft_tokens": int32(3, 3, 3, 4)},
        "sampled_token_ids[3] = [1, 2, 3]",
    ),
    "no such token": (
        lambda p: {"sampled_token_ids": with_value(p.sampled_token_ids, (0, 1), -7)},
        "sampled_token_ids[0] = [1, -7, -1]",
    ),
    "shorter than its rows": (
        lambda p: {"seq_lens": with_value(p.seq_lens, 1, 3)},
        "seq_lens[1] = 3",
    ),
    "no such slot": (
        lambda p: {"slot_mapping": with_value(p.slot_mapping, 5, -2)},
        "slot_mapping[5] = -2",
    ),
}


@pytest.mark.parametrize("case", BAD_PLANS)
def test_a_bad_plan_is_refused_by_name_and_value(case) -> None:
    change, words = BAD_PLANS[case]
    plan = STEP.plan()
    outputs = [output.tensor for output in outputs_for(STEP, plan)]
    check_rollback_plan(plan, *outputs)
    with pytest.raises(InvalidRollbackPlanError) as error:
        check_rollback_plan(plan._replace(**change(plan)), *outputs)
    assert str(error.value).startswith(f"{words} is not allowed; must be ")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"per_request": lambda t: t.long()}, "per_request.dtype = torch.int64"),
        ({"per_request": lambda t: t[:5]}, "per_request.shape = (5, 4)"),
        ({"per_request": lambda t: t[:, :3]}, "per_request.shape = (6, 3)"),
        ({"slot_mapping": lambda t: t.int()}, "out_slot_mapping.dtype = torch.int32"),
        ({"slot_mapping": lambda t: t[:12]}, "out_slot_mapping.shape[0] = 12"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_output_is_refused_by_name_and_value(change, words) -> None:
    plan = STEP.plan()
    outputs = {
        name: change.get(name, lambda t: t)(output.tensor)
        for name, output in outputs_for(STEP, plan)._asdict().items()
    }
    with pytest.raises(InvalidRollbackPlanError) as error:
        check_rollback_plan(plan, **outputs)
    assert str(error.value).startswith(f"{words} is not allowed; must be ")


def test_an_output_in_the_memory_of_an_input_is_refused() -> None:
    plan = STEP.plan()
    per_request, slot_mapping = (o.tensor for o in outputs_for(STEP, plan))
    with pytest.raises(InvalidRollbackPlanError, match=r"out_slot_mapping.* slot_mapp"):
        check_rollback_plan(plan, per_request, plan.slot_mapping)
    aliased = plan._replace(seq_lens=per_request[5])
    with pytest.raises(InvalidRollbackPlanError, match=r"per_request.*seq_lens"):
        check_rollback_plan(aliased, per_request, slot_mapping)
    whole = torch.zeros(40, dtype=torch.int64)
    whole[13:26] = plan.slot_mapping
    halves = plan._replace(slot_mapping=whole[13:26])
    check_rollback_plan(halves, per_request, whole[:13])
    with pytest.raises(InvalidRollbackPlanError, match="out_slot_mapping"):
        check_rollback_plan(halves, per_request, whole[1:14])


SCRUB = Scrub(
    (Layer("HND"), Layer("CPU vec", storage=1)),
    (Group(4, 16),),
    requests=((3, 2), (0, 0), (4, 1)),
    odd_slots=False,
)
"""Rows start at 0, 3, 3 and end at 7; rejected: 1, 2, 6."""


def scrub_memory() -> Memory:
    memory = Memory(SCRUB)
    memory.slot_mappings[0][:7] = torch.tensor([16, 17, 18, 32, 33, 34, 35])
    return memory


def arguments(memory: Memory, **changes: object) -> dict[str, object]:
    names = "kv_storages", "slot_mappings", "planes"
    names += "query_start_loc", "num_rejected_tokens"
    return dict(zip(names, memory.arguments, strict=True)) | changes


def first_plane(**values: int) -> Callable[[Memory], dict[str, object]]:
    def change(memory: Memory) -> dict[str, object]:
        planes = [replace(memory.planes[0], **values), *memory.planes[1:]]
        return {"planes": plane_table(planes, torch.device("cpu"))}

    return change


def slot_of_row(row: int, slot: int) -> Callable[[Memory], dict[str, object]]:
    def change(memory: Memory) -> dict[str, object]:
        memory.slot_mappings[0][row] = slot
        return {}

    return change


BAD_SCRUBS: dict[str, tuple[Callable, str]] = {
    "counts are floats": (
        lambda m: {"num_rejected_tokens": m.num_rejected_tokens.float()},
        "num_rejected_tokens.dtype = torch.float32",
    ),
    "starts are int64": (
        lambda m: {"query_start_loc": m.query_start_loc.long()},
        "query_start_loc.dtype = torch.int64",
    ),
    "a table of int32": (
        lambda m: {"planes": m.arguments[2].int()},
        "planes.dtype = torch.int32",
    ),
    "a column is missing": (
        lambda m: {"planes": m.arguments[2][:, :16].contiguous()},
        "planes.shape[1] = 16",
    ),
    "a storage of int8": (
        lambda m: {"kv_storages": [m.storages[0], m.storages[1].char()]},
        "kv_storages[1].dtype = torch.int8",
    ),
    "too few slots": (
        lambda m: {"slot_mappings": [m.slot_mappings[0][:6]]},
        "slot_mappings[0].shape[0] = 6",
    ),
    "counts on another device": (
        lambda m: {"num_rejected_tokens": m.num_rejected_tokens.to("meta")},
        "num_rejected_tokens.device = meta",
    ),
    "starts decrease": (
        lambda m: {"query_start_loc": int32(0, 3, 2, 7)},
        "query_start_loc[2] = 2",
    ),
    "too few starts": (
        lambda m: {"query_start_loc": int32(0, 3, 3)},
        "query_start_loc.shape[0] = 3",
    ),
    "rows of nobody": (
        lambda m: {"query_start_loc": int32(0, 3, 3, 6, 7)},
        "query_start_loc[4] = 7",
    ),
    "more rejected than rows": (
        lambda m: {"num_rejected_tokens": int32(2, 1, 1)},
        "num_rejected_tokens[1] = 1",
    ),
    "fewer rejected than none": (
        lambda m: {"num_rejected_tokens": int32(-1, 0, 1)},
        "num_rejected_tokens[0] = -1",
    ),
    "more rejected than drafts": (
        lambda m: {"num_draft_tokens": int32(1, 0, 1)},
        "num_rejected_tokens[0] = 2",
    ),
    "a slot that does not exist": (slot_of_row(4, 64), "slot_mappings[0][4] = 64"),
    "a slot below padding": (slot_of_row(4, -2), "slot_mappings[0][4] = -2"),
    "a rejected slot is committed elsewhere": (
        slot_of_row(6, 16),
        "slot_mappings[0][6] = 16",
    ),
    "a committed slot is rejected elsewhere": (
        slot_of_row(4, 18),
        "slot_mappings[0][4] = 18",
    ),
    "the same slot twice": (slot_of_row(4, 32), "slot_mappings[0][4] = 32"),
    "a mapping that nobody gave": (
        first_plane(slot_mapping_address=4096),
        "planes[0].slot_mapping_address = 0x1000",
    ),
    "a block more than there is": (
        first_plane(num_slots=5 * 16),
        "planes[0].base_address",
    ),
    "half a block": (first_plane(num_slots=40), "planes[0].num_slots = 40"),
    "half a group": (first_plane(group_size=3), "planes[0].block_size = 16"),
    "no element": (first_plane(count_2=0), "planes[0].count_2 = 0"),
    "an access of three bytes": (
        first_plane(vector_bytes=3),
        "planes[0].vector_bytes = 3",
    ),
    "an access wider than the stride": (
        first_plane(vector_bytes=2, slot_stride=33),
        "planes[0].slot_stride = 33",
    ),
}


@pytest.mark.parametrize("case", BAD_SCRUBS)
def test_a_bad_scrub_is_refused_by_name_and_value(case) -> None:
    change, words = BAD_SCRUBS[case]
    memory = scrub_memory()
    check_scrub_plan(**arguments(memory))
    changes = change(memory)
    with pytest.raises(InvalidRollbackPlanError) as error:
        check_scrub_plan(**arguments(memory, **changes))
    assert str(error.value).startswith(words)
    assert " is not allowed; must be " in str(error.value)


def test_a_plane_before_its_storage_is_refused() -> None:
    memory = scrub_memory()
    address = memory.storages[0].data_ptr() - 16
    with pytest.raises(InvalidRollbackPlanError, match=r"planes\[0\]\.base_address"):
        check_scrub_plan(
            **arguments(memory, **first_plane(base_address=address)(memory))
        )


def test_a_slot_mapping_inside_a_storage_is_refused() -> None:
    memory = scrub_memory()
    storage = torch.zeros(1 << 16, dtype=torch.uint8)
    inside = storage[:128].view(torch.int64)
    with pytest.raises(InvalidRollbackPlanError, match=r"kv_storages\[0\]"):
        check_scrub_plan(
            **arguments(memory, kv_storages=[storage], slot_mappings=[inside])
        )


def test_padding_and_the_null_block_may_be_named_by_many_rows() -> None:
    memory = scrub_memory()
    memory.slot_mappings[0][:7] = torch.tensor([16, -1, 3, 3, -1, 17, 3])
    check_scrub_plan(**arguments(memory))


BLOCKS = BlockTable(
    # Request 0 has block 1, nobody sits at 1, request 2 has block 2; 3 is a leftover.
    block_ids=torch.tensor([[1, 2], [0, 0], [2, 1]], dtype=torch.int32),
    num_blocks=int32(1, 0, 1),
    block_size=16,
)


def test_blocks_of_a_request_and_of_nobody_else_pass() -> None:
    check_scrub_plan(**arguments(scrub_memory()), block_tables=[BLOCKS])


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (
            BLOCKS._replace(num_blocks=int32(1, 0, 2)),
            r"slot_mappings\[0\]\[1\] = 17 .*request 0 shares .*also of requests \[2\]",
        ),
        (
            BLOCKS._replace(num_blocks=int32(0, 0, 1)),
            r"slot_mappings\[0\]\[1\] = 17 .*a block of request 0, and block 1 is not",
        ),
        (
            BLOCKS._replace(block_size=8),
            r"slot_mappings\[0\]\[1\] = 17 .*a block of request 0, and block 2 is not",
        ),
    ],
)
def test_a_rejected_slot_in_a_foreign_block_is_refused(table, words) -> None:
    with pytest.raises(InvalidRollbackPlanError, match=words):
        check_scrub_plan(**arguments(scrub_memory()), block_tables=[table])


@pytest.mark.parametrize(
    ("slots", "starts", "counts", "words"),
    [
        (torch.zeros(4), int32(0, 4), int32(1), "slot_mapping.dtype"),
        (torch.zeros(3).long(), int32(0, 4), int32(1), "slot_mapping.shape[0] = 3"),
        (torch.zeros(4).long(), int32(0, 4), int32(5), "num_rejected_tokens[0] = 5"),
        (torch.zeros(4).long(), int32(2, 4), int32(1), "query_start_loc[0] = 2"),
    ],
)
def test_bad_padding_is_refused_by_name_and_value(slots, starts, counts, words) -> None:
    with pytest.raises(InvalidRollbackPlanError) as error:
        check_pad_plan(slots, starts, counts)
    assert str(error.value).startswith(words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"positions": torch.zeros(5)}, "positions.dtype"),
        ({"cu_num_logits": int32(0, 4, 3)}, "cu_num_logits[2] = 3"),
        ({"cu_num_logits": int32(0, 3, 3)}, "cu_num_logits[2] = 3"),
        ({"logits_indices": torch.tensor([0, 1, 2, 9])}, "logits_indices[3] = 9"),
        ({"idx_mapping": torch.tensor([0, -1])}, "idx_mapping[1] = -1"),
        ({"seq_lens": int32(4)}, "seq_lens.shape[0] = 1"),
    ],
)
def test_a_bad_greedy_step_is_refused_by_name_and_value(change, words) -> None:
    step = step_of([Request(2, 1), Request()])
    check_greedy_step(step, *Outputs(2, 3).tensors)
    with pytest.raises(InvalidRollbackPlanError) as error:
        check_greedy_step(step._replace(**change), *Outputs(2, 3).tensors)
    assert str(error.value).startswith(words)


def recording(calls: list[str]) -> dict[str, Callable[..., None]]:
    return {
        name: lambda *arguments, name=name: calls.append(name)
        for name in schemas.SCHEMAS
    }


@pytest.mark.parametrize("kind", ["record", "module"])
def test_a_checked_backend_looks_before_it_calls(kind) -> None:
    calls: list[str] = []
    if kind == "record":
        inner = dispatch.Backend(name="spy", device_type="cpu", **recording(calls))
        backend = checked(inner)
        assert isinstance(backend, dispatch.Backend)
        assert backend.name == "spy"
    else:
        inner = SimpleNamespace(NAME="spy", **recording(calls))
        backend = checked(inner)
        assert backend.NAME == "spy"
    plan, memory = STEP.plan(), scrub_memory()
    outputs = [output.tensor for output in outputs_for(STEP, plan)]
    padding = memory.slot_mappings[0].clone(), *memory.arguments[3:]
    backend.rollback_metadata(plan, *outputs)
    backend.pad_rejected_rows(*padding)
    backend.scrub_rejected_slots(*memory.arguments)
    greedy = step_of([Request(2, 1)]), *Outputs(1, 3).tensors
    backend.accept_greedily(*greedy)
    assert calls == [*recording(calls)]

    calls.clear()
    for call in (
        lambda: backend.rollback_metadata(plan, outputs[0], plan.slot_mapping),
        lambda: backend.pad_rejected_rows(padding[0][:2], *padding[1:]),
        lambda: backend.scrub_rejected_slots([], *memory.arguments[1:]),
        lambda: backend.accept_greedily(greedy[0], *Outputs(1, 2).tensors),
    ):
        with pytest.raises(InvalidRollbackPlanError):
            call()
    assert calls == []
    inner.pad_rejected_rows()
    assert calls == ["pad_rejected_rows"], "the backend itself must stay unchecked"


def test_a_module_can_be_checked_and_does_its_work() -> None:
    memory = scrub_memory()
    checked(reference).scrub_rejected_slots(*memory.arguments)
    plain = scrub_memory()
    reference.scrub_rejected_slots(*plain.arguments)
    for storage, expected in zip(memory.storages, plain.storages, strict=True):
        assert torch.equal(storage, expected)
