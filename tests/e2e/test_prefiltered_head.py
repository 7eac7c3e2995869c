"""A head prefiltered in 8 bits: the same tokens, and only where no more is asked."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.tiny_model.expand import Expansion
from examples.tiny_model.grow import expand_checkpoint
from tests.e2e.conftest import (
    NUM_TOKENS,
    Reference,
    complete_restricted,
    complete_to_stop_string,
    complete_with_logprobs,
)
from tests.support.engines import ENGINE_ARGUMENTS, engine, greedy, model_runner
from tests.support.heldout import BUNDLED_CHECKPOINT
from vllm_mtp.integration.cpu.int8_drafts import has_kernel
from vllm_mtp.integration.cpu.int8_weights import MAX_FEW_ROWS, multiplies_all_rows
from vllm_mtp.integration.cpu.prefiltered_head import MIN_WEIGHTS, PrefilteredLogits
from vllm_mtp.verification.prefilter import Int8Prefilter

pytestmark = pytest.mark.skipif(
    not has_kernel(), reason="no x86 CPU with AVX2 and without AMX"
)

SPECULATION: dict[str, Any] = {"method": "mtp_plus"}
if not multiplies_all_rows():
    # Rows of all requests are prefiltered then, too.
    SPECULATION["num_speculative_tokens"] = 1
    assert ENGINE_ARGUMENTS["max_num_seqs"] * 2 <= MAX_FEW_ROWS

SIZES = Expansion(hidden_size=512)
"""Of this size the bundled model's head is prefiltered; it computes the same."""


@pytest.fixture(scope="module")
def expanded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "expanded"
    expand_checkpoint(BUNDLED_CHECKPOINT, folder, SIZES)
    return folder


@pytest.fixture(scope="module")
def llm(expanded: Path, reference: Reference) -> Iterator[Any]:
    # The reference first: two engines cannot live in one process.
    with engine(expanded, speculative_config=SPECULATION) as llm:
        yield llm


class Counter:
    """How many rows prefiltering served, and how many the whole head multiplied."""

    prefiltered = whole = 0


@pytest.fixture
def counter(llm: Any, monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter()
    ours = prefiltered_logits(llm)
    prefilter, whole = Int8Prefilter.logits, ours.original.forward

    def count_prefiltered(
        self: Int8Prefilter, hidden_states: torch.Tensor, rest: Any
    ) -> Any:
        logits = prefilter(self, hidden_states, rest)
        counter.prefiltered += 0 if logits is None else len(hidden_states)
        return logits

    def count_whole(head: Any, hidden_states: torch.Tensor, *args: Any) -> Any:
        counter.whole += len(hidden_states)
        return whole(head, hidden_states, *args)

    monkeypatch.setattr(Int8Prefilter, "logits", count_prefiltered)
    monkeypatch.setattr(ours.original, "forward", count_whole)
    return counter


def prefiltered_logits(llm: Any) -> PrefilteredLogits:
    (found,) = [
        module
        for module in model_runner(llm).model.modules()
        if isinstance(module, PrefilteredLogits)
    ]
    return found


def test_greedy_texts_are_the_same_and_nearly_every_row_is_prefiltered(
    llm: Any, counter: Counter, reference: Reference
) -> None:
    assert greedy(llm, reference.prompts, NUM_TOKENS) == reference.continuations
    assert counter.prefiltered > NUM_TOKENS * len(reference.prompts)
    assert counter.whole <= 0.01 * counter.prefiltered


def test_stop_strings_end_texts_where_they_did(
    llm: Any, counter: Counter, reference: Reference
) -> None:
    found = complete_to_stop_string(llm, reference.prompts)
    wanted = reference.stopped
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    assert counter.prefiltered > 0


def test_logprobs_take_the_whole_head(
    llm: Any, counter: Counter, reference: Reference
) -> None:
    found = complete_with_logprobs(llm, reference.prompts[:16])
    assert counter.prefiltered == 0
    for completion, wanted in zip(found, reference.with_logprobs, strict=True):
        assert completion.token_ids == wanted.token_ids
        for place, of_place in zip(completion.logprobs, wanted.logprobs, strict=True):
            assert place.keys() == of_place.keys()
            for token_id, logprob in place.items():
                wanted_logprob = of_place[token_id].logprob
                assert logprob.logprob == pytest.approx(wanted_logprob, abs=1e-3)


def test_whatever_changes_logits_takes_the_whole_head(
    llm: Any, counter: Counter, reference: Reference
) -> None:
    assert complete_restricted(llm, reference.prompts) == reference.restricted
    assert counter.whole > 0


@pytest.mark.parametrize(
    "sampling",
    [
        {"prompt_logprobs": 1},
        {"temperature": 0.7, "seed": 1},
        {"logit_bias": {5: 1.0}},
        {"repetition_penalty": 1.2},
        {"min_tokens": 8},
        {"structured_outputs": "regex"},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
def test_one_request_that_asks_for_more_is_enough(
    llm: Any, counter: Counter, reference: Reference, sampling: dict[str, Any]
) -> None:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import StructuredOutputsParams

    if "structured_outputs" in sampling:
        pattern = StructuredOutputsParams(regex="[a-z]{8}")
        sampling = {"structured_outputs": pattern}
    plain = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=list(p)) for p in reference.prompts[:3]],
        [SamplingParams(**(plain | (sampling if i == 1 else {}))) for i in range(3)],
        use_tqdm=False,
    )
    # As long as it is there nobody's rows are prefiltered, and it leaves last or not.
    assert counter.whole >= 8
    for place in (0, 2):
        found = outputs[place].outputs[0].token_ids
        assert list(found) == reference.continuations[place][: len(found)]


def test_weights_that_change_are_followed(
    llm: Any, counter: Counter, reference: Reference
) -> None:
    ours = prefiltered_logits(llm)
    head = model_runner(llm).model.lm_head
    before = dict(ours._copies)
    head.quant_method.process_weights_after_loading(head)  # as a reload does
    assert greedy(llm, reference.prompts[:4], 16) == [
        tokens[:16] for tokens in reference.continuations[:4]
    ]
    assert counter.prefiltered > 0
    (copy,) = ours._copies.values()
    assert copy is not before[id(head)]


def test_in_bfloat16_tokens_are_those_of_the_whole_head(
    expanded: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same hidden states; texts of two engines part where rounding differs."""
    prefilter, prefiltered = Int8Prefilter.logits, []

    def keep(self: Int8Prefilter, hidden_states: torch.Tensor, rest: Any) -> Any:
        logits = prefilter(self, hidden_states, rest)
        if logits is not None:
            prefiltered.append((hidden_states.clone(), logits.argmax(dim=1)))
        return logits

    monkeypatch.setattr(Int8Prefilter, "logits", keep)
    options = {"dtype": "bfloat16", "speculative_config": SPECULATION}
    with engine(expanded, **options) as llm:
        greedy(llm, reference.prompts[:16], NUM_TOKENS)
        head, ours = model_runner(llm).model.lm_head, prefiltered_logits(llm)
        hidden_states = torch.cat([rows for rows, _ in prefiltered])
        chosen = torch.cat([token_ids for _, token_ids in prefiltered])
        logits = ours.original(head, hidden_states)
    assert len(chosen) > 500
    wanted = logits.max(dim=1)
    differ = (chosen != wanted.indices).nonzero()[:, 0]
    # Sums in another order may fall on the other side of a bfloat16's edge.
    assert len(differ) <= 0.01 * len(chosen)
    others = logits[differ, chosen[differ]].float()
    unit = torch.finfo(torch.bfloat16).eps * wanted.values[differ].float().abs()
    assert (wanted.values[differ].float() - others <= unit).all()


@pytest.mark.parametrize(
    ("size", "verify_head"), [(256, "auto"), (512, "whole")], ids=str
)
def test_a_small_head_and_one_that_is_to_be_whole_stay_whole(
    tmp_path: Path, size: int, verify_head: str, reference: Reference
) -> None:
    assert 256 * 16384 < MIN_WEIGHTS <= 512 * 16384
    folder = tmp_path / "model"
    expand_checkpoint(BUNDLED_CHECKPOINT, folder, Expansion(hidden_size=size))
    spec = {"method": "mtp_plus", "verify_head": verify_head}
    with engine(folder, speculative_config=spec) as llm:
        found = greedy(llm, reference.prompts[:4], 16)
        modules = list(model_runner(llm).model.modules())
    assert found == [tokens[:16] for tokens in reference.continuations[:4]]
    ours = [module for module in modules if isinstance(module, PrefilteredLogits)]
    assert all(copy is None for each in ours for copy in each._copies.values())
    assert len(ours) == (verify_head == "auto")
