"""Metadata rollback: backends against the reference, the reference against loops."""

import pytest
import torch
from hypothesis import given

from tests.kernels.plans import (
    MAX_DRAFT_LENGTH,
    PADDING,
    VOCAB_SIZE,
    Request,
    Step,
    assert_metadata_equals_reference,
    decode,
    examples,
    outputs_for,
    prefill,
    roll_back,
    steps,
)
from tests.support.checked import check_rollback_plan
from vllm_mtp.kernels import reference

MIXED = Step(
    (
        decode(4, 5),
        decode(4, 1),
        prefill(9),
        PADDING,
        decode(0, 1),
        Request(3, 2, (5, None, 6)),
        Request(5, sampled=(8,)),
        decode(MAX_DRAFT_LENGTH, 9),
        PADDING,
        PADDING,
    ),
    num_tail_rows=5,
    num_extra_rows=4,
)
EDGES = {
    "empty batch": Step(()),
    "empty batch with rows": Step((), num_tail_rows=3, num_extra_rows=2),
    "only padding": Step((PADDING, PADDING), num_tail_rows=4),
    "no drafts at all": Step((decode(0, 1), decode(0, 1)), without_drafts=True),
    "nothing sampled": Step((Request(5, 4, ()), Request(1))),
    "every draft rejected": Step((decode(MAX_DRAFT_LENGTH, 1),)),
    "every draft accepted": Step((decode(MAX_DRAFT_LENGTH, MAX_DRAFT_LENGTH + 1),)),
    "no token is in the vocabulary": Step((Request(3, 2, (VOCAB_SIZE,) * 3),)),
    "more sampled than drafts": Step((Request(2, 1, (1, 2, 3)), decode(1, 1))),
    "discarded with drafts": Step((Request(3, 2, (1, 2, 3), discarded=True),)),
    "a long prompt": Step((decode(2, 2), prefill(8192), decode(2, 1)), num_tail_rows=9),
    "a long tail": Step((decode(1, 1),), num_tail_rows=5000, num_extra_rows=40000),
    "int64 tokens with gaps": Step(
        (decode(2, 2), decode(2, 3)), token_dtype=torch.int64, row_slack=2
    ),
}


@examples(150)
@given(step=steps())
def test_any_step_is_rolled_back_as_by_the_reference(backend, step) -> None:
    assert_metadata_equals_reference(backend, step, backend.device_type)


@pytest.mark.parametrize("step", [MIXED, *EDGES.values()], ids=["mixed", *EDGES])
def test_an_edge_is_rolled_back_as_by_the_reference(backend, step) -> None:
    assert_metadata_equals_reference(backend, step, backend.device_type)


def test_outputs_and_tokens_may_have_any_strides(backend) -> None:
    plan = MIXED.plan(backend.device_type)
    tokens = plan.sampled_token_ids
    plan = plan._replace(sampled_token_ids=tokens.t().contiguous().t())
    expected, _ = roll_back(reference, MIXED, plan)
    _, slot_mapping = outputs_for(MIXED, plan)
    whole = torch.full((6, 2 * len(MIXED.requests)), -999, dtype=torch.int32)
    whole = whole.to(backend.device_type)
    backend.rollback_metadata(plan, whole[:, ::2], slot_mapping.tensor)
    assert torch.equal(whole[:, ::2], expected.tensor)
    assert (whole[:, 1::2] == -999).all()


@examples(100)
@given(step=steps())
def test_the_reference_does_what_its_table_says(step) -> None:
    plan = step.plan()
    outputs = roll_back(reference, step, plan)
    tokens, slots = plan.sampled_token_ids.tolist(), plan.slot_mapping.tolist()
    kept, start = [], 0
    for index, request in enumerate(step.requests):
        end = start + request.num_rows
        valid = [t for t in tokens[index] if t != -1 and t < VOCAB_SIZE]
        if request.discarded or request.num_rows == 0:
            valid = []
        accepted = min(max(len(valid) - 1, 0), request.num_drafts)
        rejected = request.num_drafts - accepted
        backup = int(plan.backup_next_token_ids[index])
        assert outputs.per_request.tensor[:, index].tolist() == [
            valid[-1] if valid else backup,
            len(valid),
            accepted,
            rejected,
            max(end - 1 - rejected, 0),
            int(plan.seq_lens[index]) - rejected,
        ]
        kept += range(start, end - rejected)
        start = end
    assert outputs.slot_mapping.tensor.tolist() == [
        slots[row] if row in kept and row < len(slots) else -1
        for row in range(outputs.slot_mapping.tensor.shape[0])
    ]


@examples(100)
@given(step=steps())
def test_the_checked_mode_lets_the_drawn_steps_pass(step) -> None:
    plan = step.plan()
    check_rollback_plan(plan, *(o.tensor for o in outputs_for(step, plan)))
