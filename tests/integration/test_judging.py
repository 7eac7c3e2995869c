"""Drawn drafts that nobody verifies are tested as verification would have done."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_mtp.integration.v1.shadow_drafts import DraftJudge, judge_unverified

CPU = torch.device("cpu")
NUM_REQUESTS = 40_000
TARGET = [3.0, 1.0, 0.0, -1.0, 2.0]
PROPOSAL = [0.1, 0.5, 0.1, 0.2, 0.1]
NAMES = [str(number) for number in range(NUM_REQUESTS)]


def judged_share(top_k: int | None = None, top_p: float | None = None) -> float:
    """Of drafts drawn from ``PROPOSAL``, those that ``TARGET`` would have accepted."""
    proposal = torch.tensor(PROPOSAL)
    generator = torch.Generator().manual_seed(1)
    drafts = proposal.multinomial(NUM_REQUESTS, True, generator=generator)
    judge = DraftJudge(CPU)
    judge.begin_pass(NAMES)
    judge.drawn(drafts, proposal[drafts])
    logits = torch.tensor(TARGET).repeat(NUM_REQUESTS, 1)
    before = logits.clone()
    judge.judge(
        logits,
        None if top_k is None else torch.full((NUM_REQUESTS,), top_k),
        None if top_p is None else torch.full((NUM_REQUESTS,), top_p),
        NAMES,
    )
    assert torch.equal(logits, before), "the sampler goes on with them"
    verdicts = judge.take_verdicts()
    assert list(verdicts) == NAMES
    return sum(verdicts.values()) / NUM_REQUESTS


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
    assert judged_share(top_k, top_p) == pytest.approx(overlap, abs=5 * deviation)


def test_requests_are_found_by_name_wherever_their_rows_are() -> None:
    judge = DraftJudge(CPU)
    judge.begin_pass(["a", "gone", "b"])
    # Of two certain proposals the target wants only the one of b.
    judge.drawn(torch.tensor([0, 1, 2]), torch.ones(3))
    judge.drawn(torch.tensor([4, 4, 4]), torch.ones(3))  # the second draft step
    logits = torch.full((3, 5), -100.0)
    logits[:, 2] = 0.0
    judge.judge(logits, None, None, ["new", "b", "a"])
    assert judge.take_verdicts() == {"b": True, "a": False}
    assert judge.take_verdicts() == {}


class Runner:
    """As much of vLLM's runner as is wrapped."""

    def __init__(self) -> None:
        def forward(logits: Any, generators: Any, k: Any, p: Any) -> str:
            return "drawn"

        self.sampler = SimpleNamespace(
            topk_topp_sampler=SimpleNamespace(forward=forward)
        )
        self.input_batch = SimpleNamespace(req_ids=["a"])

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        return self.sampler.topk_topp_sampler.forward(logits, {}, None, None)


@pytest.mark.parametrize(
    ("max_spec_len", "is_judged"), [(None, True), (0, True), (2, False)]
)
def test_only_rows_that_follow_committed_tokens_judge(
    max_spec_len: int | None, is_judged: bool
) -> None:
    """In a step that verifies, the sampler's rows are those after all drafts."""
    runner, judge = Runner(), DraftJudge(CPU)
    judge_unverified(runner, judge)
    judge.begin_pass(["a"])
    judge.drawn(torch.tensor([0]), torch.ones(1))
    metadata = None
    if max_spec_len is not None:
        metadata = SimpleNamespace(max_spec_len=max_spec_len)
    assert runner._sample(torch.tensor([[0.0, -100.0]]), metadata) == "drawn"
    assert judge.take_verdicts() == ({"a": True} if is_judged else {})
    assert not judge.has_drafts, "drafts are judged by the next step or never"
    runner._sample(torch.tensor([[0.0, -100.0]]), None)
    assert judge.take_verdicts() == {}
