"""A draft token is invisible to every position before it.

The drafter of a running engine is overruled, so that the target verifies draft tokens
of our choice, and the target's logits are recorded. Rows of one verification pass::

    row             0                  1              ...   K
    input           last committed     draft token 0  ...   draft token K - 1
    position        p                  p + 1          ...   p + K
    judges          draft token 0      draft token 1  ...   (bonus token)

Draft token ``j`` is the input of row ``j + 1``: rows 0..j must not know it.

Looks into Model Runner V1, which vLLM uses on CPU.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.engines import family_engine, greedy, model_runner
from tests.support.families import ATTENTION_FAMILIES
from tests.support.families.family import VOCAB_SIZE
from tests.support.random_checkpoints import random_prompts, write_checkpoint

K = 3
MAX_TOKENS = 24
PROMPTS = random_prompts(3, seed=2)
ENGINE = {"enable_prefix_caching": False, "max_num_seqs": 1}

ROUNDING = 1e-3
"""Largest allowed difference of two logits that should be equal. Logits reach 55. Sums
in another order differ by up to 3e-5, rows with another context by 0.7 and more."""


class Pass(NamedTuple):
    """One forward pass of the target over one request."""

    # [num_rows]
    positions: list[int]
    # [num_rows, vocab_size] float32: row i judges the token at positions[i] + 1
    logits: torch.Tensor


class TargetRecorder:
    """Keeps the logits of every forward pass of the target."""

    def __init__(self, runner: Any) -> None:
        self.passes: list[Pass] = []
        self._positions: list[int] = []
        self._compute_logits = runner.model.compute_logits
        runner.model.register_forward_pre_hook(self._note_positions, with_kwargs=True)
        runner.model.compute_logits = self._record

    def _note_positions(self, _model: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        self._positions = kwargs["positions"].tolist()

    def _record(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = self._compute_logits(hidden_states)
        # A prefill asks for its last row only.
        rows = self._positions[-len(logits) :]
        self.passes.append(Pass(rows, logits.clone()))
        return logits

    def take(self) -> list[Pass]:
        """The passes since the last call."""
        passes, self.passes = self.passes, []
        return passes


def by_position(passes: list[Pass]) -> dict[int, torch.Tensor]:
    """Logits of committed tokens: a position after a rejection is computed again, and
    the last pass over it is the one with committed inputs only."""
    return {
        position: row
        for one_pass in passes
        for position, row in zip(one_pass.positions, one_pass.logits, strict=True)
    }


class ForcedDrafts:
    """Replaces what the MTP layer proposed by a text of our choice.

    The MTP layer still runs, so whatever it writes to the KV cache is written.
    """

    def __init__(self, drafter: Any) -> None:
        self.text: list[int] = []
        """Token by position, prompt included; beyond its end token 0 is drafted."""
        self._propose = drafter.propose
        drafter.propose = self._overrule

    def _overrule(self, **inputs: Any) -> torch.Tensor:
        proposed = self._propose(**inputs)
        sampled_rows = inputs["token_indices_to_sample"]
        row = -1 if sampled_rows is None else int(sampled_rows[0])
        # The row's own output is at the next position, its drafts after that.
        first = int(inputs["target_positions"][row]) + 2
        text = [*self.text[first:], *[0] * K]
        return proposed.new_tensor([text[: proposed.shape[1]]])


class Reference(NamedTuple):
    """A prompt decoded one token at a time, without speculation."""

    prompt: list[int]
    output: list[int]
    logits: dict[int, torch.Tensor]

    @property
    def text(self) -> list[int]:
        """Token by position."""
        return self.prompt + self.output


class Bench(NamedTuple):
    """What the tests of one family share."""

    references: list[Reference]
    llm: Any
    recorder: TargetRecorder
    drafts: ForcedDrafts

    def decode(
        self, reference: Reference, drafted_text: list[int], max_tokens: int
    ) -> tuple[list[int], list[Pass]]:
        """Output and passes when ``drafted_text`` is what the drafter proposes."""
        self.drafts.text = drafted_text
        self.recorder.take()
        [output] = greedy(self.llm, [reference.prompt], max_tokens)
        return output, self.recorder.take()

    def first_verification(
        self, reference: Reference, drafted_text: list[int]
    ) -> torch.Tensor:
        """Logits of the first pass with draft tokens, ``[1 + K, vocab_size]``."""
        _, [prefill, verification, *_] = self.decode(reference, drafted_text, K + 2)
        p = len(reference.prompt)
        assert prefill.positions == [p - 1]
        assert verification.positions == [p + row for row in range(K + 1)]
        return verification.logits


def _decode_one_by_one(family: str, model: Path) -> list[Reference]:
    with family_engine(model, family, **ENGINE) as llm:
        recorder = TargetRecorder(model_runner(llm))
        references = []
        for prompt in PROMPTS:
            [output] = greedy(llm, [prompt], MAX_TOKENS)
            passes = recorder.take()
            assert all(len(one_pass.positions) == 1 for one_pass in passes)
            references.append(Reference(prompt, output, by_position(passes)))
    return references


@pytest.fixture(scope="module", params=ATTENTION_FAMILIES)
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """References of a family, and its engine with overruled drafts."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("looks into Model Runner V1, which vLLM uses on CPU")
    family = request.param
    model = write_checkpoint(tmp_path_factory.mktemp(family), family)
    references = _decode_one_by_one(family, model)
    options = {
        "method": "mtp_plus",
        "num_speculative_tokens": K,
        "controller": "fixed",
    }
    with family_engine(model, family, options, **ENGINE) as llm:
        runner = model_runner(llm)
        drafts = ForcedDrafts(runner.drafter)
        yield Bench(references, llm, TargetRecorder(runner), drafts)


def other_token(token: int) -> int:
    """A token that is not ``token``, nor likely next to it."""
    return (token + VOCAB_SIZE // 2) % VOCAB_SIZE


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.mark.parametrize("j", range(K))
def test_draft_token_j_changes_no_logit_before_it_and_all_after_it(
    bench: Bench, j: int
) -> None:
    for reference in bench.references:
        changed_text = list(reference.text)
        at = len(reference.prompt) + 1 + j
        changed_text[at] = other_token(changed_text[at])
        before = bench.first_verification(reference, reference.text)
        after = bench.first_verification(reference, changed_text)
        assert largest_difference(before[: j + 1], after[: j + 1]) < ROUNDING
        for row in range(j + 1, K + 1):
            assert largest_difference(before[row], after[row]) > 100 * ROUNDING, row


def test_verification_logits_equal_those_of_decoding_one_token_at_a_time(
    bench: Bench,
) -> None:
    for reference in bench.references:
        output, passes = bench.decode(reference, reference.text, MAX_TOKENS)
        assert output == reference.output
        # All drafts were accepted: three of four positions were rows 1..K of a pass.
        assert len(passes) == 1 + -(-(MAX_TOKENS - 1) // (K + 1))
        _assert_committed_logits_equal(passes, reference)


def test_rejected_draft_tokens_leave_no_trace_in_later_logits(bench: Bench) -> None:
    for reference in bench.references:
        # Wrong at positions that make passes reject at each of their draft tokens.
        drafted_text = [
            other_token(token) if position % 7 in (0, 1, 3, 6) else token
            for position, token in enumerate(reference.text)
        ]
        output, passes = bench.decode(reference, drafted_text, MAX_TOKENS)
        assert output == reference.output
        starts = [one_pass.positions[0] for one_pass in passes[1:]]
        committed = {end - start for start, end in pairwise(starts)}
        assert committed >= set(range(1, K + 1))
        _assert_committed_logits_equal(passes, reference)


def _assert_committed_logits_equal(passes: list[Pass], reference: Reference) -> None:
    logits = by_position(passes)
    first = len(reference.prompt) - 1
    for position in range(first, first + MAX_TOKENS):
        difference = largest_difference(logits[position], reference.logits[position])
        assert difference < ROUNDING, (position, difference)
