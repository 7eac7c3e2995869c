"""The engines of the fuzzer: one that says what is right, and what disturbs the others.

Each axis turns on what could change an answer and must not. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from random import Random
from typing import Any

from vllm_mtp.config import DEFAULT_DRAFT_LENGTH, MAX_DRAFT_LENGTH, METHOD
from vllm_mtp.tools.engine_arguments import BLOCK_TOKENS, EngineSize, engine_arguments

MAX_MODEL_LEN = 384
SEATS = 8
REFERENCE_SEATS = 48
KV_CACHE_MIB = 256
"""Room for all requests of the reference at their longest, for the bundled model."""
TIGHT_BUDGET = SEATS + 3
"""Tokens of a step where prompts are cut into chunks: hardly one for each seat."""

RANDOM_K = {"controller": "random"}
ASYNC = {"async_scheduling": True}
RESET_SEED = "a step that an async reset drops has drawn from the seed already"
RESET_PROMPT = "an async reset drops prompt logprobs for good"
"""With and without speculation (``docs/upstream/prompt-logprobs-after-reset.md``)."""
_PROMPT_LOGPROBS = {"prompt_logprobs", "prompt_logprob_token_ids"}
DISTURBED: dict[str, Any] = {"is_disturbed": True, "proof": "num_disturbed"}
SMALL_CACHE: dict[str, Any] = {"has_small_cache": True, "proof": "num_preempted"}
ADAPTERS: dict[str, Any] = {"has_adapters": True, "proof": "num_adapted"}

NUM_ADAPTERS = 3
ADAPTER_CHANCE = 0.6
ADAPTER_SLOTS: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": NUM_ADAPTERS + 1,
    "max_lora_rank": 8,
}
"""With a slot that stays empty, which requests without an adapter get on a CPU: see
``docs/upstream/lora-last-slot.md``."""

CONNECTOR: dict[str, Any] = {
    "kv_transfer_config": {
        "kv_connector": "FuzzConnector",
        "kv_connector_module_path": "vllm_mtp.integration.fuzz.connector",
        "kv_role": "kv_both",
    },
    # All prompts that come again are loaded, and vLLM's example wants whole prompts.
    "enable_prefix_caching": False,
    "max_num_batched_tokens": SEATS * (MAX_MODEL_LEN + MAX_DRAFT_LENGTH),
}

COMMON: dict[str, Any] = {
    "max_logprobs": -1,
    "scheduling_policy": "priority",
    # What python code opens and closes again and again; thinking_token_budget needs it.
    "reasoning_config": {
        "reasoning_start_str": "(",
        "reasoning_end_str": ")",
    },
}
"""Arguments of vLLM's ``EngineArgs`` for all engines, so that nothing else differs."""


@dataclass(frozen=True)
class Axis:
    """An engine that speculates, and what disturbs it.

    Attributes:
        speculation: Keys of its speculative config, over the user's.
        arguments: Of vLLM's ``EngineArgs``.
        proof: What `fuzz_engines.COUNTS` must count if it was put to the test at all.
        is_disturbed: Whether it is paused and its cache emptied while requests run.
        has_adapters: Whether some requests are answered with LoRA adapters.
        has_small_cache: Whether its KV cache has room for one long request alone.
    """

    speculation: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    proof: str = "accepted"
    is_disturbed: bool = False
    has_adapters: bool = False
    has_small_cache: bool = False

    def exclusion(
        self, play: Sequence[Mapping[str, Any]], request: Mapping[str, Any]
    ) -> str | None:
        """Why a request's answers cannot be held against the reference's, or None."""
        if not (self.arguments.get("async_scheduling") and is_reset(play)):
            return None
        options = [chunk["sampling"] for chunk in request["chunks"]]
        if any(each.get("temperature") for each in options):
            return RESET_SEED
        asks = any(_PROMPT_LOGPROBS & each.keys() for each in options)
        return RESET_PROMPT if asks else None


AXES: Mapping[str, Axis] = {
    "sync": Axis(RANDOM_K, proof="num_copied"),
    "async": Axis(RANDOM_K, ASYNC),
    "no prefix cache": Axis(RANDOM_K, {"enable_prefix_caching": False}),
    "chunks": Axis(
        RANDOM_K, {"max_num_batched_tokens": TIGHT_BUDGET}, proof="num_copied"
    ),
    "async chunks": Axis(RANDOM_K, {"max_num_batched_tokens": TIGHT_BUDGET} | ASYNC),
    "small cache": Axis(RANDOM_K, **SMALL_CACHE),
    "async small cache": Axis(RANDOM_K, ASYNC, **SMALL_CACHE),
    "disturbed": Axis(RANDOM_K, **DISTURBED),
    "async disturbed": Axis(RANDOM_K, ASYNC, **DISTURBED),
    "adapters": Axis(RANDOM_K, ADAPTER_SLOTS, **ADAPTERS),
    "async adapters": Axis(RANDOM_K, ADAPTER_SLOTS | ASYNC, **ADAPTERS),
    "KV connector": Axis(RANDOM_K, CONNECTOR, proof="num_loaded_tokens"),
    "async KV connector": Axis(RANDOM_K, CONNECTOR | ASYNC, proof="num_loaded_tokens"),
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
    """Arguments of vLLM's ``EngineArgs`` for an axis."""
    # Pins are drawn up to this K, whatever the controller.
    bound = {"num_speculative_tokens": DEFAULT_DRAFT_LENGTH}
    config = {**bound, **speculative_config, **axis.speculation, "method": METHOD}
    size = EngineSize(model, MAX_MODEL_LEN, SEATS, kv_cache_mib=KV_CACHE_MIB)
    usual = engine_arguments(size, config, on_gpu)
    arguments = {**usual, **COMMON, **user, **axis.arguments}
    if axis.has_small_cache:
        # Blocks for one request at its longest with its drafts, and the null block.
        longest = arguments["max_model_len"] + MAX_DRAFT_LENGTH + 1
        arguments["num_gpu_blocks_override"] = ceil(longest / BLOCK_TOKENS) + 1
    return arguments


def on_axis(axis: Axis, play: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The play as it is on an axis; a play that is so already stays as it is.

    vLLM loses sessions that are preempted under async scheduling, without speculation,
    too (``docs/upstream/preempted-session.md``): where that happens there are none.
    """
    play = list(play) if axis.is_disturbed else undisturbed(play)
    if axis.has_small_cache and axis.arguments.get("async_scheduling"):
        play = [each for each in play if not each.get("session")]
    return [_adapted(each) for each in play] if axis.has_adapters else play


def _adapted(request: dict[str, Any]) -> dict[str, Any]:
    """The request, perhaps with an adapter, which its name says."""
    name = request["name"]
    rng = Random(f"adapter {name}")
    if "adapter" in name or rng.random() > ADAPTER_CHANCE:
        return request
    number = rng.randint(1, NUM_ADAPTERS)
    return request | {"name": f"{name} adapter {number}", "adapter": number}


def reference_arguments(
    model: str, user: Mapping[str, Any], on_gpu: bool
) -> dict[str, Any]:
    """Arguments of vLLM's ``EngineArgs`` for the engine without speculation."""
    size = EngineSize(model, MAX_MODEL_LEN, REFERENCE_SEATS, kv_cache_mib=KV_CACHE_MIB)
    usual = engine_arguments(size, None, on_gpu)
    # A whole prompt in one step: on a CPU vLLM dies of a seed where it is cut.
    budget = {"max_num_batched_tokens": REFERENCE_SEATS * MAX_MODEL_LEN}
    return {**usual, **budget, **COMMON, **user}


RESET, PAUSE, CLEAR, SLEEP = "reset", "pause", "pause and clear", "sleep"
ABORTING = "pause and abort"
KINDS = (RESET, PAUSE, CLEAR, SLEEP, ABORTING)
"""`RESET` empties the prefix cache while requests run: all of them are preempted.
`PAUSE` freezes them, with `CLEAR` the cache is emptied meanwhile, and `SLEEP` is vLLM's
sleep with requests that are kept. On a CPU vLLM frees no memory of an engine that
sleeps, so levels 1 and 2 are the same there and no weights are lost."""

LIKELIHOOD = {RESET: 4, PAUSE: 3, CLEAR: 3, SLEEP: 2, ABORTING: 0.5}
NUM_IN_PLAY = (2, 4, 6, 9)
MAX_STEP, MAX_LASTS = 15, 6

Request = dict[str, Any]


def disturb(play: Sequence[Request], rng: Random) -> list[Request]:
    """The play with disturbances."""
    count = min(rng.choice(NUM_IN_PLAY), len(play))
    chosen = set(rng.sample(range(len(play)), count))
    disturbed = []
    for number, request in enumerate(play):
        if number in chosen:
            (what,) = rng.choices(KINDS, [LIKELIHOOD[kind] for kind in KINDS])
            step, lasts = rng.randint(0, MAX_STEP), rng.randint(0, MAX_LASTS)
            event = {"step": step, "what": what, "lasts": 0 if what == RESET else lasts}
            request = request | {"disturbs": event}
        disturbed.append(request)
    return disturbed


def undisturbed(play: Sequence[Mapping[str, Any]]) -> list[Request]:
    """The play without disturbances."""
    return [
        {key: value for key, value in request.items() if key != "disturbs"}
        for request in play
    ]


def is_reset(play: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the prefix cache is emptied while steps are under way."""
    return any((each.get("disturbs") or {}).get("what") == RESET for each in play)
