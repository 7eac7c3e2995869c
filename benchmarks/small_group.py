"""Engines of the smaller benchmarks: started, given prompts, warmed up, played."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.grid.cells import PROMPT_TOKENS, Prompts
from benchmarks.grid.engines import Timed, cut_prompts, play_together
from benchmarks.grid.options import GridOptions
from vllm_mtp.tools.engine_arguments import EngineSize
from vllm_mtp.tools.engine_process import NO_SPECULATION, START_TIMEOUT_S, EngineGroup

NUM_WARM_UPS = 2
"""Untimed rounds: the controller learns, and prompts come into the prefix cache."""

_SPARE_TOKENS = 16
"""vLLM's `mtp` has nothing drafted for a batch of which a request nears the end of the
model."""

Waves = Sequence[Sequence[Mapping[str, Any]]]


def room_for(request_tokens: int) -> int:
    """A ``max_model_len`` for benchmark prompts with so many tokens of answer."""
    return PROMPT_TOKENS + request_tokens + _SPARE_TOKENS


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
        group.launch(name, config, size, logs, **arguments)
    facts = [group.engines[name].answer(START_TIMEOUT_S) for name in contenders]
    sizes = GridOptions(concurrencies=(size.max_num_seqs,), output=logs)
    baseline = group.engines[NO_SPECULATION]
    return cut_prompts(baseline, facts[0]["vocab_size"], sizes)


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
        play_together(group, names, waves, concurrency)
    rounds = []
    for repeat in range(num_repeats):
        console.print(f"repeat {repeat + 1}/{num_repeats}", highlight=False)
        shift = repeat % len(names)
        in_turn = [*names[shift:], *names[:shift]]
        rounds.append(play_together(group, in_turn, waves, concurrency, timed))
    return rounds
