"""What the bundled checkpoint says without speculation: computed once a session.

Two engines cannot live in one process at a time, so everything that tests compare
with is generated here, before their own engine starts.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from tests.support.engines import engine, greedy
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts

NUM_PROMPTS = 64
NUM_TOKENS = 96

STOP_STRINGS = ["self", ")\n", "return"]


class Reference(NamedTuple):
    """Prompts and what the target alone makes of them."""

    prompts: tuple[tuple[int, ...], ...]
    continuations: list[list[int]]
    """Greedy, 96 tokens of each prompt."""
    stopped: list[Any]
    """Completions that end at a stop string."""
    with_logprobs: list[Any]
    """Completions of the first 16 prompts, 48 tokens, with their top 5 logprobs."""
    restricted: list[list[int]]
    """Greedy continuations under ``RESTRICTIONS``, see ``complete_restricted``."""


def complete(llm: Any, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[Any]:
    """vLLM's completion of each prompt; greedy unless told otherwise."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts],
        SamplingParams(**({"temperature": 0} | sampling)),
        use_tqdm=False,
    )
    return [output.outputs[0] for output in outputs]


def complete_to_stop_string(llm: Any, prompts: Sequence[Sequence[int]]) -> list[Any]:
    return complete(llm, prompts, max_tokens=NUM_TOKENS, stop=STOP_STRINGS)


def complete_with_logprobs(llm: Any, prompts: Sequence[Sequence[int]]) -> list[Any]:
    return complete(llm, prompts, max_tokens=48, logprobs=5, ignore_eos=True)


def restrictions() -> list[dict[str, Any]]:
    """Ways in which a request changes the logits before the best token is taken."""
    from vllm.sampling_params import StructuredOutputsParams

    number = StructuredOutputsParams(regex=r"[0-9]{3,6}(, [0-9]{1,3}){2,5}")
    keyword = StructuredOutputsParams(
        choice=["return", "yield from", "raise ValueError"]
    )
    return [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.8, "frequency_penalty": 0.6},
        {"allowed_token_ids": list(range(256, 1500))},
        {"logit_bias": {i: 2.5 for i in range(300, 400)}, "repetition_penalty": 1.3},
        {"bad_words": ["self", "return", "the"]},
        {"min_tokens": 24, "ignore_eos": False, "stop": ["\n"]},
        {"structured_outputs": number},
        {"structured_outputs": keyword},
    ]


def complete_restricted(llm: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Every restriction on the same few prompts, all in one batch."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    pairs = [(p, r) for p in prompts[:6] for r in restrictions()]
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=list(prompt)) for prompt, _ in pairs],
        [SamplingParams(temperature=0, max_tokens=40, **r) for _, r in pairs],
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="session")
def reference() -> Reference:
    """64 prompts of held-out Python, float32, no speculation."""
    prompts = heldout_prompts(NUM_PROMPTS)
    with engine(BUNDLED_CHECKPOINT, max_num_seqs=16) as llm:
        return Reference(
            prompts,
            greedy(llm, prompts, NUM_TOKENS),
            complete_to_stop_string(llm, prompts),
            complete_with_logprobs(llm, prompts[:16]),
            complete_restricted(llm, prompts),
        )
