"""Texts of the target, as token ids: an engine of this process, for a while."""

from collections.abc import Sequence
from typing import Any

from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

from vllm_mtp.config import ConfigError

_CPU_KV_CACHE_BYTES = 2 * 2**30
"""By default vLLM takes 92 % of a machine's memory, or refuses to start where another
program has some of it."""


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

    Raises:
        ConfigError: The engine does not start.
    """
    memory: dict[str, Any] = {}
    if current_platform.is_cpu():
        memory["kv_cache_memory_bytes"] = _CPU_KV_CACHE_BYTES
    try:
        llm = LLM(model, dtype=dtype, **memory)
    except (RuntimeError, ValueError):
        raise ConfigError(
            f"model: vLLM could not start {model}; its log above says why"
        ) from None
    sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    chats = [prompt for prompt in prompts if not isinstance(prompt, str)]
    outputs = llm.generate(texts, sampling) if texts else []
    outputs += llm.chat(chats, sampling) if chats else []
    return [list(output.outputs[0].token_ids) for output in outputs]
