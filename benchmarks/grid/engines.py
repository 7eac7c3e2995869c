"""What the benchmarks ask of their engines: prompts, and rounds in turns."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from benchmarks.grid.cells import Prompts, make_prompts
from benchmarks.grid.options import GridOptions
from benchmarks.grid.prose import PROSE
from benchmarks.grid.turns import TURN_S, take_turns, turn_cores
from examples.tiny_model import TINY_MODEL
from vllm_mtp.tools.engine_process import EngineGroup, EngineProcess
from vllm_mtp.tools.prompts import load_prompts

Timed = Literal["parts", "launches"]
"""What of steps an engine can time or count in a round, which costs a little."""

MAX_CODE_PROMPTS = 128


class BenchGroup(EngineGroup):
    """Engines of a benchmark."""

    module = "benchmarks.engine"


def cut_prompts(
    engine: EngineProcess, vocab_size: int, options: GridOptions
) -> Prompts:
    """Prompts of all workloads, cut with an engine's tokenizer."""
    found = load_prompts(None, str(TINY_MODEL), MAX_CODE_PROMPTS)
    code = [prompt.plain_text for prompt in found]
    *code_ids, prose_ids = engine.ask("tokenize", texts=[*code, PROSE])["token_ids"]
    return make_prompts(code_ids, prose_ids, vocab_size, options)


def play_together(
    group: EngineGroup,
    names: Sequence[str],
    waves: Sequence[Sequence[Mapping[str, Any]]],
    concurrency: int,
    timed: Timed | None = None,
    cached: Sequence[Sequence[int]] | None = None,
    turn_s: float = TURN_S,
) -> dict[str, dict[str, Any]]:
    """A round of several engines in turns of a few steps; see ``turns.py``.

    Args:
        group: Holds them.
        names: Of the engines; the first begins.
        waves: Requests, see ``integration/commands/commanded_engine.py``.
        concurrency: Requests at a time.
        timed: What of a step to time apart.
        cached: All that the prefix caches hold when it begins; None: what they do.
        turn_s: Seconds of a turn.

    Returns:
        What each engine counted, by name.
    """
    for name in names:
        group.engines[name].ask(
            "begin",
            waves=waves,
            concurrency=concurrency,
            timed=timed,
            cached=cached,
        )
    players = {name: group.engines[name] for name in names}
    take_turns(players, turn_cores(), turn_s)
    return {name: group.engines[name].ask("result") for name in names}
