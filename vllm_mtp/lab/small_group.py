"""Engines of the smaller benchmarks: started, given prompts, warmed up, played."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_mtp.lab.demo_plan import NO_SPECULATION
from vllm_mtp.lab.grid_cells import Prompts
from vllm_mtp.lab.grid_engines import (
    START_TIMEOUT_S,
    EngineGroup,
    EngineProcess,
    engine_arguments,
    engine_environ,
)
from vllm_mtp.lab.grid_options import GridOptions
from vllm_mtp.lab.provenance import gpu_names

KV_CACHE_MIB = 128
NUM_WARM_UPS = 2
"""Untimed rounds: the controller learns, and prompts come into the prefix cache."""

Waves = Sequence[Sequence[Mapping[str, Any]]]


def start_engines(
    group: EngineGroup,
    contenders: Mapping[str, dict[str, Any] | None],
    model: str,
    max_model_len: int,
    max_num_seqs: int,
    logs: Path,
) -> Prompts:
    """Start all contenders at once and wait for them.

    Args:
        group: Stops them later.
        contenders: Speculative config by name; one is `NO_SPECULATION`.
        model: Folder or hub name.
        max_model_len: Tokens of the longest request.
        max_num_seqs: Most requests at a time.
        logs: Folder for what vLLM prints.

    Raises:
        ServerError: An engine failed.
    """
    environ = engine_environ(os.environ, logs, Path(model).is_dir())
    for name in contenders:
        log = logs / f"{name.replace(' ', '-')}.log"
        group.add(EngineProcess(name, log, environ))
    for name, config in contenders.items():
        arguments = engine_arguments(
            model,
            config,
            "float32",
            max_model_len,
            max_num_seqs,
            KV_CACHE_MIB,
            bool(gpu_names()),
        )
        group.engines[name].tell("start", engine=arguments)
    facts = [group.engines[name].answer(START_TIMEOUT_S) for name in contenders]
    sizes = GridOptions(concurrencies=(max_num_seqs,), output=logs)
    baseline = group.engines[NO_SPECULATION]
    return baseline.cut_prompts(facts[0]["vocab_size"], sizes)


def play_repeats(
    group: EngineGroup,
    waves: Waves,
    concurrency: int,
    num_repeats: int,
    console: Console,
) -> list[dict[str, dict[str, Any]]]:
    """Rounds of all engines together, each begun by another one.

    Args:
        group: The engines.
        waves: Requests, the same in every round.
        concurrency: Requests at a time.
        num_repeats: Timed rounds.
        console: Told how far it is.

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
        rounds.append(group.play_together(in_turn, waves, concurrency))
    return rounds
