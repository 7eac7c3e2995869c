"""Responses also say the mean K of their request, beside vLLM's figures.

And whether what was accepted was the target's choice or chance.
"""

from collections.abc import Callable
from typing import Any

from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from vllm_mtp.integration.load.wrapping import wrap_once
from vllm_mtp.metrics.stats import SYNTHETIC_ACCEPTANCE

MEAN_DRAFT_LENGTH = "mean_draft_length"
"""Draft tokens of a verification, in the mean; 0 without any."""


_of_engine = {SYNTHETIC_ACCEPTANCE: False}
"""Of the engine that was configured last: a server's process has one."""


def install(is_synthetic: bool) -> None:
    """Wrap what makes a response's figures; twice changes nothing.

    Called when an engine with our method is configured: servers of other methods keep
    vLLM's own function.

    Args:
        is_synthetic: The engine accepts draft tokens by chance.
    """
    _of_engine[SYNTHETIC_ACCEPTANCE] = is_synthetic
    wrap_once(RequestSpecDecodeMetrics, "to_dict", _wrap)


def _wrap(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def to_dict(self: Any) -> dict[str, Any]:
        figures = original(self)
        num_steps = figures["num_spec_steps"]
        mean = figures["num_draft_tokens"] / num_steps if num_steps else 0.0
        return {MEAN_DRAFT_LENGTH: mean, **_of_engine, **figures}

    return to_dict
