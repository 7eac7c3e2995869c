"""Samples of an engine under every way in which a request can change its logits."""

import os
from collections.abc import Sequence
from typing import Any

from tests.support.engines import Samples, sampled
from tests.support.heldout import heldout_prompts
from vllm_mtp.tools.verify_compare import MIN_CELLS, homogeneity_p_value, num_cells

ALPHA = 1e-5
"""p-value below which two engines differ: once in 100,000 comparisons of equal ones."""

IS_LONG = "EXACTNESS_SAMPLES" in os.environ
"""Asked for by the user: all combinations, and as many samples as the variable says."""
NUM_SAMPLES = int(os.environ.get("EXACTNESS_SAMPLES", "225"))
"""Of each setting. 3000 find nearly four times smaller faults in an hour."""
NUM_PLAIN = NUM_SAMPLES if IS_LONG else 2 * NUM_SAMPLES
"""Of each setting without speculation, where they are cheap and are compared with all
others: 225 and 450 find what 300 and 300 would (1/225 + 1/450 = 2/300)."""
NUM_TOKENS = 3
PROMPT = 3


PLAINLY_SAMPLED = ("plain", "cool, top-k", "top-p")
"""A batch of these alone is verified in another way: `is_plainly_sampled`."""


def settings() -> dict[str, dict[str, Any]]:
    """Sampling parameters by name; all run in one batch."""
    from vllm.sampling_params import StructuredOutputsParams

    biased = {*prompt_token_ids(), *range(256, 356)}
    # Few digits, so that outcomes come often enough to be counted.
    number = StructuredOutputsParams(regex=r"[0-2]{2,4}(,[0-2]{1,3}){2,5}")
    return {
        "plain": {"temperature": 1.0},
        "cool, top-k": {"temperature": 0.7, "top_k": 12},
        "top-p": {"temperature": 1.0, "top_p": 0.85},
        "min-p": {"temperature": 1.0, "min_p": 0.3},
        "penalties": {
            "temperature": 1.0,
            "repetition_penalty": 1.6,
            "presence_penalty": 0.7,
            "frequency_penalty": 0.5,
        },
        # Biases come before penalties, which scale what they are given: some tokens of
        # the prompt get both.
        "bias, penalties": {
            "temperature": 0.5,
            "logit_bias": {i: 9.0 if i % 2 else -9.0 for i in biased},
            "repetition_penalty": 2.0,
        },
        "allowed, bad words": {
            "temperature": 1.0,
            "allowed_token_ids": list(range(256, 1200)),
            "bad_words": ["self", "return"],
        },
        "grammar": {"temperature": 1.0, "structured_outputs": number},
    }


def prompt_token_ids() -> tuple[int, ...]:
    """Of the prompt that all samples continue."""
    return heldout_prompts(8, max_tokens=24)[PROMPT]


def sample(
    llm: Any, names: Sequence[str] | None = None, num_samples: int = NUM_SAMPLES
) -> Samples:
    """Draw from each setting; those of all settings run side by side.

    Args:
        llm: The engine.
        names: Of settings; None for all.
        num_samples: Of each.
    """
    known = settings()
    return sampled(
        llm,
        prompt_token_ids(),
        {name: known[name] for name in names or known},
        num_samples,
        NUM_TOKENS,
    )


def p_values(first: Samples, second: Samples) -> dict[tuple[str, int], float]:
    """Of the first one, two and three tokens, by setting and number.

    Where outcomes are so many that nearly all are rare, longer ones say nothing.

    Args:
        first: Samples of an engine.
        second: Of another one; of all settings of the first, or more.
    """
    found = {}
    for name in first:
        for number in (1, 2, 3):
            pair = [[t[:number] for t in samples[name]] for samples in (first, second)]
            if num_cells(*pair) >= MIN_CELLS:
                found[name, number] = homogeneity_p_value(*pair)
    assert {name for name, _ in found} == set(first)
    return found
