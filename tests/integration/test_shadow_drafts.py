"""Shadow drafts that were drawn are tested as verification would have done."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_mtp.integration.v1.shadow_drafts import ShadowTest, show_sampled_rows

CPU = torch.device("cpu")
NUM_REQUESTS = 40_000
TARGET = [3.0, 1.0, 0.0, -1.0, 2.0]
PROPOSAL = [0.1, 0.5, 0.1, 0.2, 0.1]
NAMES = [str(number) for number in range(NUM_REQUESTS)]


def accepted_share(top_k: int | None = None, top_p: float | None = None) -> float:
    """Of drafts drawn from ``PROPOSAL``, those that ``TARGET`` would have accepted."""
    proposal = torch.tensor(PROPOSAL)
    generator = torch.Generator().manual_seed(1)
    drafts = proposal.multinomial(NUM_REQUESTS, True, generator=generator)
    shadow = ShadowTest(CPU)
    shadow.begin_pass(NAMES)
    shadow.drawn(drafts, proposal[drafts])
    shadow.open(verifies_nothing=True)
    logits = torch.tensor(TARGET).repeat(NUM_REQUESTS, 1)
    before = logits.clone()
    shadow.test(
        logits,
        None if top_k is None else torch.full((NUM_REQUESTS,), top_k),
        None if top_p is None else torch.full((NUM_REQUESTS,), top_p),
        NAMES,
    )
    assert torch.equal(logits, before), "the sampler goes on with them"
    accepted = shadow.take()
    assert list(accepted) == NAMES
    return sum(accepted.values()) / NUM_REQUESTS


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (None, None, [0, 1, 2, 3, 4]),
        (2, None, [0, 4]),
        (None, 0.5, [0]),
        (3, 0.99, [0, 1, 4]),
    ],
)
def test_as_many_are_accepted_as_target_and_proposal_overlap(
    top_k: int | None, top_p: float | None, kept: list[int]
) -> None:
    logits = torch.full((5,), -torch.inf)
    logits[kept] = torch.tensor(TARGET)[kept]
    overlap = torch.minimum(logits.softmax(0), torch.tensor(PROPOSAL)).sum().item()
    deviation = (overlap * (1 - overlap) / NUM_REQUESTS) ** 0.5
    assert accepted_share(top_k, top_p) == pytest.approx(overlap, abs=5 * deviation)


def test_requests_are_found_by_name_wherever_their_rows_are() -> None:
    shadow = ShadowTest(CPU)
    shadow.begin_pass(["a", "gone", "b"])
    # Of two certain proposals the target wants only the one of b.
    shadow.drawn(torch.tensor([0, 1, 2]), torch.ones(3))
    shadow.drawn(torch.tensor([4, 4, 4]), torch.ones(3))  # the second draft step
    shadow.open(verifies_nothing=True)
    logits = torch.full((3, 5), -100.0)
    logits[:, 2] = 0.0
    shadow.test(logits, None, None, ["new", "b", "a"])
    assert shadow.take() == {"b": True, "a": False}
    assert shadow.take() == {}


def test_only_rows_that_follow_committed_tokens_test_shadow_drafts() -> None:
    """In a step that verifies, the sampler's rows are those after all drafts."""

    def forward(logits: Any, generators: Any, k: Any, p: Any) -> str:
        return "drawn"

    draws = SimpleNamespace(forward=forward)
    runner: Any = SimpleNamespace(
        sampler=SimpleNamespace(topk_topp_sampler=draws),
        input_batch=SimpleNamespace(req_ids=["a"]),
    )
    shadow, logits = ShadowTest(CPU), torch.tensor([[0.0, -100.0]])
    show_sampled_rows(runner, shadow)
    for verifies_nothing in (True, False):
        shadow.begin_pass(["a"])
        shadow.drawn(torch.tensor([0]), torch.ones(1))
        shadow.open(verifies_nothing)
        assert draws.forward(logits, {}, None, None) == "drawn"
        assert shadow.take() == ({"a": True} if verifies_nothing else {})
        shadow.close()
        shadow.open(verifies_nothing=True)
        draws.forward(logits, {}, None, None)
        assert shadow.take() == {}, "tested by the next step or never"
