"""Drafts continued from contexts: the same joint distribution of the first tokens.

The prompt holds a text, the target's own answer to it, and the text again: what is
sampled often begins as that answer does, and then the context offers the rest. Compared
by chi-square with an engine that does not speculate, like ``test_distributions``: the
first three tokens jointly, of which the third may be a copy, and each later one alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.e2e.exactness.samples import ALPHA, p_values, prompt_token_ids
from tests.support.engines import Samples, engine, greedy, model_runner, sampled
from tests.support.heldout import BUNDLED_CHECKPOINT
from tests.support.watch import record_outcomes, scheduler_of
from vllm_mtp.control.controller import DecidesEveryStep
from vllm_mtp.integration.v1.copied_rows import CopiedRows
from vllm_mtp.records import DecodeRequest, DraftDecision, StepOutcome
from vllm_mtp.tools.verify_compare import homogeneity_p_value

SEATS = {"max_num_seqs": 48, "max_num_batched_tokens": 8192}
NUM_SAMPLES, NUM_PLAIN = 300, 600
NUM_TOKENS = 6
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.8},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "penalties": {"temperature": 0.7, "frequency_penalty": 0.3},
}


def answer(llm: Any) -> list[int]:
    """The target's, to the text that is repeated."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    prompt = TokensPrompt(prompt_token_ids=list(prompt_token_ids()))
    return list(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.fixture(scope="module")
def plain() -> Iterator[tuple[list[int], Samples]]:
    """The prompt, and samples of the target alone."""
    with engine(BUNDLED_CHECKPOINT, **SEATS) as llm:
        text = list(prompt_token_ids())
        prompt = [*text, *answer(llm), *text]
        yield prompt, sampled(llm, prompt, SETTINGS, NUM_PLAIN, NUM_TOKENS)


@contextmanager
def copying_engine(rejection: str) -> Iterator[Any]:
    spec = {
        "method": "mtp_plus",
        "num_speculative_tokens": 4,
        "rejection_sample_method": rejection,
    }
    with engine(BUNDLED_CHECKPOINT, speculative_config=spec, **SEATS) as llm:
        assert model_runner(llm).drafter.copies
        scheduler_of(llm).controller = CopiesAll()
        yield llm


class CopiesAll(DecidesEveryStep):
    """A draft token for everybody, and whatever the context offers after it; for every
    other request, and where the context offers it, instead of it."""

    def decide(self, requests: Sequence[DecodeRequest]) -> DraftDecision:
        ids = [request.request_id for request in requests]
        chains, copies = dict.fromkeys(ids, 1), dict.fromkeys(ids, 4)
        alone = dict.fromkeys(ids[::2], 3)
        return DraftDecision(1, chains, "copy", None, copies, 0.5, alone)

    def may_draft(self) -> bool:
        return True

    def observe(self, outcome: StepOutcome) -> None:
        pass


def all_p_values(first: Samples, second: Samples) -> dict[tuple[str, int], float]:
    found = p_values(first, second)
    for name in first:
        for place in range(3, NUM_TOKENS):
            pair = [
                [t[place : place + 1] for t in each[name]] for each in (first, second)
            ]
            found[name, place + 1] = homogeneity_p_value(*pair)
    return found


def copied(llm: Any, prompt: list[int]) -> Samples:
    """Samples of an engine that copies, some of them within one step."""
    before = scheduler_of(llm)._copying.num_verified
    samples = sampled(llm, prompt, SETTINGS, NUM_SAMPLES, NUM_TOKENS)
    assert scheduler_of(llm)._copying.num_verified > before + 500
    return samples


def test_blocks_with_copies_follow_the_target(plain: tuple[list[int], Samples]) -> None:
    prompt, expected = plain
    with copying_engine("block") as llm:
        found = all_p_values(copied(llm, prompt), expected)
        recorder = record_outcomes(llm)
        greedy(llm, [prompt], 12)
    # Alone a request copies all of its drafts: the MTP layers make none then.
    assert any(
        step.requests
        and before.draft_depth == 0
        and 0 < step.requests[0].num_draft_tokens == step.requests[0].num_copied
        for before, step in pairwise(recorder.outcomes)
    )
    assert min(found.values()) > ALPHA, {k: p for k, p in found.items() if p < 0.01}


def test_copies_follow_the_target_unless_they_count_as_hardly_proposed(
    plain: tuple[list[int], Samples], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the end nearly all of them are accepted, which must be noticed."""
    prompt, expected = plain
    with copying_engine("standard") as llm:
        found = all_p_values(copied(llm, prompt), expected)
        assert min(found.values()) > ALPHA, {k: p for k, p in found.items() if p < 0.01}
        propose = CopiedRows.propose_for_sure

        def propose_hardly(self: CopiedRows, probs: torch.Tensor) -> None:
            propose(self, probs)
            probs[self._rows] *= 0.05

        monkeypatch.setattr(CopiedRows, "propose_for_sure", propose_hardly)
        found = all_p_values(copied(llm, prompt), expected)
        assert min(found.values()) < ALPHA
