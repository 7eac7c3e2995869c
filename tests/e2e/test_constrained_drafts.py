"""Drafts know what requests forbid or discourage: same output, more accepted."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.engines import draft_counts, engine
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts
from vllm_mtp.integration.v1.draft_constraints import DraftConstraints

NUM_PROMPTS, NUM_TOKENS = 12, 40
KINDS: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.4},
    "presence and frequency": {"presence_penalty": 1.2, "frequency_penalty": 0.8},
    "bias": {"logit_bias": {i: 4.0 if i % 2 else -4.0 for i in range(3, 1003)}},
    "allowed tokens": {"allowed_token_ids": list(range(3, 16384, 2))},
    "bad words": {"bad_words": ["self", "return", "def", "the", "if", "=", "None"]},
}
NUM_SAMPLED_RUNS = 2
"""Pooled: one run of the same at temperature 1 differs from the next by 3 points."""


def generate(
    llm: Any, options: dict[str, Any], temperature: float, others: bool = True
) -> list[list[int]]:
    """Every prompt twice in one batch, once without the options if there are others."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    shared = {"temperature": temperature, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    prompts = [
        TokensPrompt(prompt_token_ids=list(p)) for p in heldout_prompts(NUM_PROMPTS)
    ]
    beside = {} if others else options
    params = [SamplingParams(**shared, **options), SamplingParams(**shared, **beside)]
    outputs = llm.generate(
        [prompt for prompt in prompts for _ in params],
        params * NUM_PROMPTS,
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def plain() -> dict[str, list[list[int]]]:
    with engine(BUNDLED_CHECKPOINT, max_num_seqs=8) as llm:
        return {name: generate(llm, options, 0.0) for name, options in KINDS.items()}


def acceptance(llm: Any, run: Callable[[], None]) -> float:
    """Share of accepted draft tokens while something is generated."""
    before = draft_counts(llm)
    run()
    after = draft_counts(llm)
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    return accepted / (
        accepted + after.num_rejected_tokens - before.num_rejected_tokens
    )


def greedy_and_sampled_acceptance(
    llm: Any, options: dict[str, Any], plain: list[list[int]]
) -> tuple[float, float]:
    """Greedy texts must be the target's."""

    def greedy() -> None:
        assert generate(llm, options, 0.0) == plain

    def sampled() -> None:
        for _ in range(NUM_SAMPLED_RUNS):
            generate(llm, options, 1.0, others=False)

    return acceptance(llm, greedy), acceptance(llm, sampled)


@pytest.mark.parametrize("vocabulary", ["full", "auto"])
def test_greedy_texts_are_equal_and_more_is_accepted(
    vocabulary: str,
    plain: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = {"method": "mtp_plus", "controller": "fixed", "draft_vocab": vocabulary}
    knowing, blind = {}, {}
    # Of an automatic vocabulary two: what draws from the whole one is the same code.
    few = ("repetition penalty", "bad words")
    kinds = {k: v for k, v in KINDS.items() if vocabulary == "full" or k in few}
    with engine(BUNDLED_CHECKPOINT, max_num_seqs=8, speculative_config=spec) as llm:
        for name, options in kinds.items():
            shares = greedy_and_sampled_acceptance(llm, options, plain[name])
            knowing[name] = shares
        monkeypatch.setattr(DraftConstraints, "apply", lambda self, logits, _: logits)
        for name, options in kinds.items():
            blind[name] = greedy_and_sampled_acceptance(llm, options, plain[name])
    print(vocabulary, {name: (blind[name], knowing[name]) for name in kinds})
    for name in kinds:
        for known, unknown in zip(knowing[name], blind[name], strict=True):
            assert known > unknown, name
