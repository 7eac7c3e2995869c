"""Engines of the smaller benchmarks: started, given prompts, warmed up, played."""

import os
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from vllm_mtp.lab.demo_plan import NO_SPECULATION
from vllm_mtp.lab.grid_cells import PROMPT_TOKENS, Prompts
from vllm_mtp.lab.grid_engines import (
    BLOCK_TOKENS,
    START_TIMEOUT_S,
    EngineGroup,
    EngineProcess,
    Timed,
    engine_arguments,
    engine_environ,
)
from vllm_mtp.lab.grid_options import GridOptions
from vllm_mtp.lab.provenance import gpu_names

_KV_CACHE_MIB = 128
"""Where blocks are counted, and vLLM wants a size all the same."""
_ROOM = 2
"""Times what the running requests need: nobody is preempted, and prompts are kept."""
NUM_WARM_UPS = 2
"""Untimed rounds: the controller learns, and prompts come into the prefix cache."""

_SPARE_TOKENS = 16
"""vLLM's `mtp` has nothing drafted for a batch of which a request nears the end of the
model."""

Waves = Sequence[Sequence[Mapping[str, Any]]]


class EngineSize(NamedTuple):
    """What all contenders have in common.

    Attributes:
        model: Folder or hub name.
        max_model_len: Tokens of the longest request.
        max_num_seqs: Most requests at a time.
        dtype: Weights and arithmetic.
        kv_cache_mib: KV cache of each; None for as many blocks as requests need.
    """

    model: str
    max_model_len: int
    max_num_seqs: int
    dtype: str = "float32"
    kv_cache_mib: int | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of KV cache with which no request waits for another one."""
        return _ROOM * self.max_num_seqs * ceil(self.max_model_len / BLOCK_TOKENS)


def room_for(request_tokens: int) -> int:
    """A ``max_model_len`` for benchmark prompts with so many tokens of answer."""
    return PROMPT_TOKENS + request_tokens + _SPARE_TOKENS


def launch_engine(
    group: EngineGroup,
    name: str,
    config: dict[str, Any] | None,
    size: EngineSize,
    logs: Path,
    **arguments: Any,
) -> EngineProcess:
    """Start an engine; its answer, the facts about it, is not waited for.

    Args:
        group: Stops it later.
        name: Of the contender.
        config: Speculative config; None without speculation.
        size: Model and room for requests.
        logs: Folder for what vLLM prints.
        **arguments: Of vLLM's ``EngineArgs``; they win.
    """
    environ = engine_environ(os.environ, logs, Path(size.model).is_dir())
    engine = EngineProcess(name, logs / f"{name.replace(' ', '-')}.log", environ)
    group.add(engine)
    usual = engine_arguments(
        size.model,
        config,
        size.dtype,
        size.max_model_len,
        size.max_num_seqs,
        size.kv_cache_mib or _KV_CACHE_MIB,
        bool(gpu_names()),
    )
    if size.kv_cache_mib is None:
        usual["num_gpu_blocks_override"] = size.num_blocks
    engine.tell("start", engine=usual | arguments)
    return engine


def start_engines(
    group: EngineGroup,
    contenders: Mapping[str, dict[str, Any] | None],
    size: EngineSize,
    logs: Path,
    **arguments: Any,
) -> Prompts:
    """Start all contenders at once and wait for them.

    Args:
        group: Stops them later.
        contenders: Speculative config by name; one is `NO_SPECULATION`.
        size: Model and room for requests.
        logs: Folder for what vLLM prints.
        **arguments: Of vLLM's ``EngineArgs``; they win.

    Raises:
        ServerError: An engine failed.
    """
    for name, config in contenders.items():
        launch_engine(group, name, config, size, logs, **arguments)
    facts = [group.engines[name].answer(START_TIMEOUT_S) for name in contenders]
    sizes = GridOptions(concurrencies=(size.max_num_seqs,), output=logs)
    baseline = group.engines[NO_SPECULATION]
    return baseline.cut_prompts(facts[0]["vocab_size"], sizes)


def play_repeats(
    group: EngineGroup,
    waves: Waves,
    concurrency: int,
    num_repeats: int,
    console: Console,
    timed: Timed | None = None,
) -> list[dict[str, dict[str, Any]]]:
    """Rounds of all engines together, each begun by another one.

    Args:
        group: The engines.
        waves: Requests, the same in every round.
        concurrency: Requests at a time.
        num_repeats: Timed rounds.
        console: Told how far it is.
        timed: What of a step to time apart.

    Returns:
        For each timed round what each engine counted, by name.
    """
    names = list(group.engines)
    for number in range(NUM_WARM_UPS):
        console.print(f"warm-up {number + 1}/{NUM_WARM_UPS}", highlight=False)
        group.play_together(names, waves, concurrency)
    rounds = []
    for repeat in range(num_repeats):
        console.print(f"repeat {repeat + 1}/{num_repeats}", highlight=False)
        shift = repeat % len(names)
        in_turn = [*names[shift:], *names[:shift]]
        rounds.append(group.play_together(in_turn, waves, concurrency, timed))
    return rounds
