"""Padding rejected rows in place: every backend against the reference."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.plans import MAX_REQUESTS, Guarded, examples
from tests.support.checked import check_pad_plan
from vllm_mtp.kernels import reference


@st.composite
def paddings(draw: st.DrawFn) -> tuple[list[int], list[int], int, torch.dtype]:
    """Rows and rejected rows of each request, further rows, dtype of the counts."""
    rows = draw(st.lists(st.integers(0, 40), max_size=MAX_REQUESTS))
    rejected = [draw(st.integers(0, n)) for n in rows]
    dtype = draw(st.sampled_from((torch.int32, torch.int64)))
    return rows, rejected, draw(st.integers(0, 9)), dtype


def assert_padding_equals_reference(backend, padding, device: str = "cpu") -> None:
    rows, rejected, num_tail_rows, dtype = padding
    starts = torch.tensor([0, *rows]).cumsum(0).to(device, torch.int32)
    counts = torch.tensor(rejected, dtype=dtype, device=device)
    slots = torch.arange(sum(rows) + num_tail_rows, device=device) * 3
    actual, expected = (Guarded((len(slots),), torch.int64, device) for _ in range(2))
    for output in (actual, expected):
        output.tensor.copy_(slots)
    check_pad_plan(actual.tensor, starts, counts)
    backend.pad_rejected_rows(actual.tensor, starts, counts)
    reference.pad_rejected_rows(expected.tensor, starts, counts)
    assert actual.tensor.tolist() == expected.tensor.tolist()
    actual.assert_guards_intact("slot_mapping")
    assert starts.tolist() == [sum(rows[:i]) for i in range(len(rows) + 1)]
    assert counts.tolist() == rejected


@examples(100)
@given(padding=paddings())
def test_rejected_rows_are_padded_as_by_the_reference(backend, padding) -> None:
    assert_padding_equals_reference(backend, padding, backend.device_type)


def test_thousands_of_rows_of_one_request_are_padded(backend) -> None:
    padding = [3, 5000, 2], [1, 4999, 0], 5, torch.int32
    assert_padding_equals_reference(backend, padding, backend.device_type)


def test_a_count_above_a_requests_rows_reaches_no_other_request(backend) -> None:
    slots = torch.arange(10, 16, device=backend.device_type)
    starts = torch.tensor([0, 3, 5], dtype=torch.int32, device=backend.device_type)
    counts = torch.tensor([0, 9], device=backend.device_type)
    backend.pad_rejected_rows(slots, starts, counts)
    assert slots.tolist() == [10, 11, 12, -1, -1, 15]


def test_the_reference_pads_the_last_rows_of_each_request() -> None:
    slots = torch.arange(10, 18)
    starts = torch.tensor([0, 3, 3, 6], dtype=torch.int32)
    reference.pad_rejected_rows(slots, starts, torch.tensor([2, 0, 1]))
    assert slots.tolist() == [10, -1, -1, 13, 14, -1, 16, 17]
