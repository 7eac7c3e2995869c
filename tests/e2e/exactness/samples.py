"""Samples of an engine under every way in which a request can change its logits."""

import os
from typing import Any

from tests.support.heldout import heldout_prompts

IS_LONG = "EXACTNESS_SAMPLES" in os.environ
"""Asked for by the user: all combinations, and as many samples as the variable says."""
NUM_SAMPLES = int(os.environ.get("EXACTNESS_SAMPLES", "300"))
"""Of each setting. 3000 find three times smaller faults in an hour."""
NUM_TOKENS = 3
PROMPT = 3

Samples = dict[str, list[tuple[int, ...]]]
"""The first tokens of all requests, by setting."""


def settings() -> dict[str, dict[str, Any]]:
    """Sampling parameters by name; all run in one batch."""
    from vllm.sampling_params import StructuredOutputsParams

    # Few digits, so that outcomes come often enough to be counted.
    number = StructuredOutputsParams(regex=r"[0-2]{2,4}(,[0-2]{1,3}){2,5}")
    return {
        "plain": {"temperature": 1.0},
        "cool, top-k": {"temperature": 0.7, "top_k": 12},
        "top-p": {"temperature": 1.0, "top_p": 0.85},
        "penalties": {
            "temperature": 1.0,
            "repetition_penalty": 1.6,
            "presence_penalty": 0.7,
            "frequency_penalty": 0.5,
        },
        "allowed, bad words": {
            "temperature": 1.0,
            "allowed_token_ids": list(range(256, 1500)),
            "bad_words": ["self", "return"],
        },
        "grammar": {"temperature": 1.0, "structured_outputs": number},
    }


def sample(llm: Any) -> Samples:
    """Draw ``NUM_SAMPLES`` of each setting; those of all settings run side by side."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompt = TokensPrompt(
        prompt_token_ids=list(heldout_prompts(8, max_tokens=24)[PROMPT])
    )
    names = list(settings())
    params = {
        name: SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **options)
        for name, options in settings().items()
    }
    outputs = llm.generate(
        [prompt] * (NUM_SAMPLES * len(names)),
        [params[name] for _ in range(NUM_SAMPLES) for name in names],
        use_tqdm=False,
    )
    result: Samples = {name: [] for name in names}
    for i, output in enumerate(outputs):
        name = names[i % len(names)]
        result[name].append(tuple(output.outputs[0].token_ids))
    return result
