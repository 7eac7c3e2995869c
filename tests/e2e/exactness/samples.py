"""Samples of an engine under every way in which a request can change its logits."""

from typing import Any

from tests.support.heldout import heldout_prompts

NUM_SAMPLES = 1000
NUM_TOKENS = 3
PROMPT = 3

Samples = dict[str, list[tuple[int, ...]]]
"""The first tokens of all requests, by setting."""


def settings() -> dict[str, dict[str, Any]]:
    """Sampling parameters by name; all run in one batch."""
    from vllm.sampling_params import StructuredOutputsParams

    number = StructuredOutputsParams(regex=r"[0-9]{2,4}(, [0-9]{1,3}){2,5}")
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
        "grammar": {"temperature": 1.5, "structured_outputs": number},
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
