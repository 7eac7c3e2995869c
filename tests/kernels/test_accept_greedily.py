"""Greedy verification: every backend against the reference, and it against a loop."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.greedy_steps import REQUESTS, Outputs, Request, step_of
from tests.kernels.plans import MAX_REQUESTS, examples
from tests.support.checked import check_greedy_step
from vllm_mtp.kernels import reference
from vllm_mtp.records import GreedyStep


def accept(backend, step: GreedyStep, num_columns: int, device: str = "cpu"):
    outputs = Outputs(step.idx_mapping.shape[0], num_columns, device)
    backend.accept_greedily(step, *outputs.tensors)
    return outputs.lists()


def columns_of(requests: list[Request]) -> int:
    return 1 + max((request.num_drafts for request in requests), default=0)


@examples(200)
@given(
    requests=st.lists(REQUESTS, max_size=MAX_REQUESTS),
    seed=st.integers(0, 2**16),
    slack=st.integers(0, 3),
)
def test_it_equals_the_reference(backend, requests, seed, slack) -> None:
    device = backend.device_type
    step = step_of(requests, seed, device)
    before = [tensor.clone() for tensor in step]
    num_columns = columns_of(requests) + slack
    check_greedy_step(step, *Outputs(len(requests), num_columns, device).tensors)
    actual = accept(backend, step, num_columns, device)
    assert actual == accept(reference, step, num_columns, device)
    for tensor, copy in zip(step, before, strict=True):
        assert torch.equal(tensor, copy)


@examples(200)
@given(requests=st.lists(REQUESTS, min_size=1, max_size=10), seed=st.integers(0, 2**16))
def test_the_reference_keeps_what_the_target_would_have_said(requests, seed) -> None:
    step, num_columns = step_of(requests, seed), columns_of(requests)
    tokens, num_sampled, num_rejected = accept(reference, step, num_columns)
    for i, request in enumerate(requests):
        start = int(step.cu_num_logits[i])
        kept = min(request.num_agreeing, request.num_drafts)
        if request.placeholders and not request.prompt_left:
            kept = 0
        count = 0 if request.prompt_left else kept + 1
        said = step.target_token_ids[start : start + count].tolist()
        assert tokens[i] == said + [-1] * (num_columns - count)
        assert num_sampled[i] == count
        wasted = 0 if request.prompt_left else request.num_drafts + 1 - count
        assert num_rejected[i] == wasted


def test_more_drafts_than_a_warp_has_lanes_are_all_accepted(backend) -> None:
    requests = [Request(39, 39), Request(39, 31), Request(39, 32), Request(33, 33)]
    step = step_of(requests, device=backend.device_type)
    _, num_sampled, num_rejected = accept(backend, step, 40, backend.device_type)
    assert num_sampled == [40, 32, 33, 34]
    assert num_rejected == [0, 8, 7, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_of_equal_logits_torch_takes_the_first_as_vllm_does(dtype, device) -> None:
    """What the verification is built on; in 16 bits logits are equal all the time."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    generator = torch.Generator().manual_seed(0)
    for num_rows, vocab_size in ((1, 151_936), (7, 16_384), (300, 4_097)):
        levels = torch.randint(-3, 4, (num_rows, vocab_size), generator=generator)
        logits = levels.to(device, dtype) * 0.5
        is_largest = logits == logits.amax(1, keepdim=True)
        columns = torch.arange(vocab_size, device=device)
        lowest = torch.where(is_largest, columns, vocab_size).amin(1)
        assert torch.equal(logits.argmax(1), lowest)
