"""Drafts follow grammars: same output, and hardly a draft token is cut."""

import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.engines import counters, engine
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts
from tests.support.watch import scheduler_of
from vllm_mtp.integration.v1 import draft_vocab
from vllm_mtp.records import DecodeRequest, DraftDecision

SPEC = {"method": "mtp_plus", "controller": "fixed"}
NUMBERS = r"[0-9]{3,6}(, [0-9]{1,3}){4,8}"
KEYWORDS = ["return None", "yield from iterable", "raise ValueError"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["function", "class", "module"]},
        "lines": {"type": "integer", "minimum": 0, "maximum": 9999},
    },
    "required": ["name", "kind", "lines"],
    "additionalProperties": False,
}
NUM_PROMPTS = 6
END_TOKENS = {0, 1, 2}
SEATS = {
    "max_num_seqs": 8,
    # A small model would fill its answer with blank lines.
    "structured_outputs_config": {
        "backend": "xgrammar",
        "disable_any_whitespace": True,
    },
}


def params(temperature: float) -> list[Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    kinds = [
        StructuredOutputsParams(regex=NUMBERS),
        StructuredOutputsParams(choice=KEYWORDS),
        StructuredOutputsParams(json=json.dumps(SCHEMA)),
        None,
    ]
    return [
        SamplingParams(temperature=temperature, max_tokens=64, structured_outputs=kind)
        for kind in kinds
    ]


def generate(llm: Any, temperature: float) -> list[list[str]]:
    """Texts of each kind, all kinds in one batch."""
    from vllm.inputs import TokensPrompt

    prompts = [
        TokensPrompt(prompt_token_ids=list(p)) for p in heldout_prompts(NUM_PROMPTS)
    ]
    pairs = [(prompt, kind) for prompt in prompts for kind in params(temperature)]
    outputs = llm.generate(
        [prompt for prompt, _ in pairs], [kind for _, kind in pairs], use_tqdm=False
    )
    num_kinds = len(params(temperature))
    texts = [output.outputs[0].text for output in outputs]
    return [texts[kind::num_kinds] for kind in range(num_kinds)]


class CutDrafts:
    """Counts the draft tokens that a scheduler's grammars see and cut."""

    def __init__(self, llm: Any) -> None:
        self.num_seen = self.num_cut = 0
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        manager = scheduler.structured_output_manager
        validate = manager.validate_tokens

        def validate_and_count(request: Any, token_ids: list[int]) -> list[int]:
            kept = validate(request, token_ids)
            grammar = request.structured_output_request
            # After the end of its text a request needs no draft.
            has_ended = grammar and not END_TOKENS.isdisjoint(kept)
            if grammar and not has_ended:
                self.num_seen += len(token_ids)
                self.num_cut += len(token_ids) - len(kept)
            return kept

        manager.validate_tokens = validate_and_count


def check_valid(texts: list[list[str]]) -> None:
    numbers, keywords, objects, _ = texts
    assert all(re.fullmatch(NUMBERS, text) for text in numbers)
    assert set(keywords) <= set(KEYWORDS)
    for text in objects:
        # The grammar of a string with a length lets a tab through, as JSON does not.
        found = json.loads(text, strict=False)
        assert set(found) == set(SCHEMA["required"])
        assert found["kind"] in {"function", "class", "module"}


@pytest.fixture(scope="module")
def plain() -> list[list[str]]:
    with engine(BUNDLED_CHECKPOINT, **SEATS) as llm:
        texts = generate(llm, 0.0)
    check_valid(texts)
    return texts


def test_greedy_texts_equal_and_hardly_a_draft_is_cut(
    plain: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, accepted = {}, {}
    for masks in (False, True):
        monkeypatch.setattr(draft_vocab, "may_mask_drafts", lambda _, m=masks: m)
        with engine(BUNDLED_CHECKPOINT, speculative_config=SPEC, **SEATS) as llm:
            generate(llm, 0.0)  # compiles the grammars, in the worker, too
            count = CutDrafts(llm)
            assert generate(llm, 0.0) == plain
            cut[masks] = count.num_cut / count.num_seen
            values = counters(llm)
            accepted[masks] = values["accepted_tokens"] / values["drafts"]
    assert cut[False] > 0.2
    assert cut[True] == 0
    assert accepted[True] > 1.03 * accepted[False]


MASKED = {
    "method": "mtp_plus",
    # Not the default one: on a busy machine it may find that drafting does not pay.
    "controller": "random",
    # Contexts know nothing of grammars: copies that break one are cut.
    "copy_from_context": False,
}


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_sampled_texts_are_valid(temperature: float) -> None:
    spec = MASKED
    with engine(BUNDLED_CHECKPOINT, speculative_config=spec, **SEATS) as llm:
        check_valid(generate(llm, temperature))
        count = CutDrafts(llm)
        for _ in range(3):
            check_valid(generate(llm, temperature))
        assert count.num_seen > 100
        assert count.num_cut == 0


def test_the_controller_is_told_which_requests_are_constrained() -> None:
    from vllm import SamplingParams

    told: dict[int, set[bool]] = defaultdict(set)
    with engine(BUNDLED_CHECKPOINT, speculative_config=SPEC, **SEATS) as llm:
        controller = scheduler_of(llm).controller
        decide = controller.decide

        def listen(requests: Sequence[DecodeRequest]) -> DraftDecision:
            for request in requests:
                number = int(request.request_id.split("-")[0])
                told[number].add(request.is_constrained)
            return decide(requests)

        controller.decide = listen
        kinds = [*params(0.0), SamplingParams(allowed_token_ids=[5, 6, 7])]
        llm.generate(["def f("] * len(kinds), kinds, use_tqdm=False)
    assert [told[i] for i in sorted(told)] == [{True}] * 3 + [{False}, {True}]


def test_a_grammar_that_was_compiled_before_waits_for_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine one gets its turn late, and drafts would go without."""
    from vllm.v1.structured_output import StructuredOutputManager

    compile_it = StructuredOutputManager._create_grammar

    def late(self: Any, request: Any) -> Any:
        is_ours = not hasattr(request, "num_computed_tokens")
        if is_ours and threading.current_thread() is not threading.main_thread():
            time.sleep(0.05)
        return compile_it(self, request)

    monkeypatch.setattr(StructuredOutputManager, "_create_grammar", late)
    spec = MASKED
    with engine(BUNDLED_CHECKPOINT, speculative_config=spec, **SEATS) as llm:
        first = CutDrafts(llm)
        generate(llm, 0.7)
        assert first.num_cut > 0
        again = CutDrafts(llm)
        generate(llm, 0.7)
    assert again.num_seen > 100
    assert again.num_cut == 0
