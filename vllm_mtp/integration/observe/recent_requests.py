"""Where an engine's front end has the rounds of recent requests, and their texts."""

from collections.abc import Sequence
from typing import Any

from vllm_mtp.integration.observe.stat_logger import MTPPlusStatLogger
from vllm_mtp.page.rounds import RecentRequests
from vllm_mtp.page.texts import Decode


def recent_requests(engine: Any) -> RecentRequests | None:
    """Of this front end; None without our method or without statistics.

    Args:
        engine: vLLM's ``AsyncLLM`` or ``LLMEngine``, or None.
    """
    manager = getattr(engine, "logger_manager", None)
    for each in manager.stat_loggers if manager is not None else ():
        if isinstance(each, MTPPlusStatLogger):
            return each.recent_requests
    return None


def decoder_of(engine: Any) -> Decode:
    """Token ids to text, as the server would write them."""
    if engine.vllm_config.model_config.skip_tokenizer_init:
        return lambda token_ids: "".join(f" {each}" for each in token_ids)
    tokenizer = engine.get_tokenizer()

    def decode(token_ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    return decode
