"""The engines of the fuzzer: one that says what is right, and what disturbs the others.

Each axis turns on what could change an answer and must not. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from vllm_mtp.config import DEFAULT_DRAFT_LENGTH, MAX_DRAFT_LENGTH, METHOD
from vllm_mtp.lab.grid_engines import BLOCK_TOKENS, engine_arguments

MAX_MODEL_LEN = 384
SEATS = 8
REFERENCE_SEATS = 48
KV_CACHE_MIB = 256
"""Room for all requests of the reference at their longest, for the bundled model."""
TIGHT_BUDGET = SEATS + 3
"""Tokens of a step where prompts are cut into chunks: hardly one for each seat."""

RANDOM_K = {"controller": "random"}
ASYNC = {"async_scheduling": True}

COMMON: dict[str, Any] = {
    "max_logprobs": -1,
    "scheduling_policy": "priority",
    # What python code opens and closes again and again; thinking_token_budget needs it.
    "reasoning_config": {
        "reasoning_start_str": "self",
        "reasoning_end_str": "return",
    },
}
"""Arguments of vLLM's ``EngineArgs`` for all engines, so that nothing else differs."""


@dataclass(frozen=True)
class Axis:
    """An engine that speculates, and what disturbs it.

    Attributes:
        speculation: Keys of its speculative config, over the user's.
        arguments: Of vLLM's ``EngineArgs``.
        may_preempt: Whether it is there to preempt requests.
        is_disturbed: Whether it is paused and its cache emptied while requests run.
    """

    speculation: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    may_preempt: bool = False
    is_disturbed: bool = False


def _small_cache() -> dict[str, Any]:
    """Blocks for one request at its longest with its drafts, and the null block."""
    longest = ceil((MAX_MODEL_LEN + MAX_DRAFT_LENGTH + 1) / BLOCK_TOKENS)
    return {"num_gpu_blocks_override": longest + 1}


AXES: Mapping[str, Axis] = {
    "sync": Axis(RANDOM_K),
    "async": Axis(RANDOM_K, ASYNC),
    "no prefix cache": Axis(RANDOM_K, {"enable_prefix_caching": False}),
    "chunks": Axis(RANDOM_K, {"max_num_batched_tokens": TIGHT_BUDGET}),
    "async chunks": Axis(RANDOM_K, {"max_num_batched_tokens": TIGHT_BUDGET} | ASYNC),
    "small cache": Axis(RANDOM_K, _small_cache(), may_preempt=True),
    "async small cache": Axis(RANDOM_K, _small_cache() | ASYNC, may_preempt=True),
    "disturbed": Axis(RANDOM_K, is_disturbed=True),
    "async disturbed": Axis(RANDOM_K, ASYNC, is_disturbed=True),
    "fixed K": Axis({"controller": "fixed"}),
    "auto": Axis(),
    "async auto": Axis({}, ASYNC),
}
"""By name; a run spreads its requests over them."""


def axis_arguments(
    axis: Axis,
    model: str,
    speculative_config: Mapping[str, Any],
    user: Mapping[str, Any],
    on_gpu: bool,
) -> dict[str, Any]:
    """Arguments of vLLM's ``EngineArgs`` for an axis.

    Args:
        axis: One of `AXES`.
        model: Folder or hub name.
        speculative_config: The user's.
        user: The user's arguments; the axis' own win.
        on_gpu: Let vLLM compile and capture graphs.
    """
    # Pins are drawn up to this K, whatever the controller.
    bound = {"num_speculative_tokens": DEFAULT_DRAFT_LENGTH}
    config = {**bound, **speculative_config, **axis.speculation, "method": METHOD}
    usual = engine_arguments(
        model, config, "float32", MAX_MODEL_LEN, SEATS, KV_CACHE_MIB, on_gpu
    )
    return {**usual, **COMMON, **user, **axis.arguments}


def reference_arguments(
    model: str, user: Mapping[str, Any], on_gpu: bool
) -> dict[str, Any]:
    """Arguments of vLLM's ``EngineArgs`` for the engine without speculation.

    Args:
        model: Folder or hub name.
        user: The user's arguments.
        on_gpu: Let vLLM compile and capture graphs.
    """
    usual = engine_arguments(
        model, None, "float32", MAX_MODEL_LEN, REFERENCE_SEATS, KV_CACHE_MIB, on_gpu
    )
    # A whole prompt in one step: on a CPU vLLM dies of a seed where it is cut.
    budget = {"max_num_batched_tokens": REFERENCE_SEATS * MAX_MODEL_LEN}
    return {**usual, **budget, **COMMON, **user}
