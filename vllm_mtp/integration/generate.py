"""Texts of the target, as token ids: an engine of this process, for a while."""

from collections.abc import Sequence
from typing import Any

from vllm import LLM, SamplingParams


def generate_token_ids(
    model: str,
    prompts: Sequence[Any],
    max_tokens: int,
    temperature: float,
    dtype: str = "auto",
) -> list[list[int]]:
    """Let the target answer.

    Args:
        model: Folder or hub name.
        prompts: A text each, or a list of messages, for which the chat template is
            used.
        max_tokens: Longest answer.
        temperature: Of sampling; 0 is greedy.
        dtype: As in ``--dtype``.

    Returns:
        New tokens of each answer.
    """
    llm = LLM(model, dtype=dtype)
    sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    chats = [prompt for prompt in prompts if not isinstance(prompt, str)]
    outputs = llm.generate(texts, sampling) if texts else []
    outputs += llm.chat(chats, sampling) if chats else []
    return [list(output.outputs[0].token_ids) for output in outputs]
