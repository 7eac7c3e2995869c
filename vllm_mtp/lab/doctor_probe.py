"""What drafting would gain on this machine: tried with one engine and a few prompts.

Requests pin their draft length (`request_options`), so one engine serves all of them;
a pinned 0 costs what no speculation costs (`vllm-mtp bench off`). For each K the
prediction is ``L(K) / (t(K) / t(0))``: acceptance length ``L(K) = 1 + S_1 + .. + S_K``
with the survival that the longest drafts showed, over the measured step time. The same
prompts are served with every K, one right after the other; step times are compared
within these seconds only: a shared machine is half as fast again in some minutes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console

from vllm_mtp.acceptance import expected_acceptance_length, speedup
from vllm_mtp.config import METHOD, ConfigError
from vllm_mtp.lab.demo import log_folder
from vllm_mtp.lab.demo_plan import read_prompts
from vllm_mtp.lab.demo_servers import exit_on_signals
from vllm_mtp.lab.grid_engines import START_TIMEOUT_S, EngineGroup, EngineProcess
from vllm_mtp.lab.small_group import EngineSize, launch_engine
from vllm_mtp.request_options import FLAT_KEY

LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8)
NUM_PROMPTS = 12
"""At least; each is served with every K."""
MIN_CYCLES = 4
PROMPT_TOKENS, REQUEST_TOKENS = 96, 40
WITHOUT_PAUSE_S = 60.0
NEXT_TO_NOTHING = 0.1
"""First-position acceptance that no intact MTP layer has on ordinary text."""


class LengthFigures(NamedTuple):
    """Of one draft length."""

    draft_length: int
    acceptance_length: float
    step_seconds: float
    draft_seconds: float
    """Within a step; 0 where the runner cannot be split."""
    predicted_speedup: float


@dataclass(frozen=True)
class ProbeResult:
    """What was seen, and what follows."""

    survival: list[float]
    lengths: list[LengthFigures]

    @property
    def best(self) -> LengthFigures:
        """The fastest; the shortest draft among equals."""
        return max(
            self.lengths, key=lambda each: (each.predicted_speedup, -each.draft_length)
        )

    @property
    def draft_cost(self) -> float:
        """Of one draft step, in steps without speculation."""
        longest = self.lengths[-1]
        per_step = longest.draft_seconds / longest.draft_length
        return per_step / self.lengths[0].step_seconds

    def as_json(self) -> dict[str, Any]:
        """For the report."""
        return {
            "survival": self.survival,
            "lengths": [each._asdict() for each in self.lengths],
            "best_draft_length": self.best.draft_length,
            "predicted_speedup": self.best.predicted_speedup,
            "draft_cost": self.draft_cost,
            "formula": "(1 + S_1 + .. + S_K) / (t(K) / t(0))",
        }


def run_probe(
    model: str, dtype: str, concurrency: int, console: Console | None
) -> ProbeResult:
    """Start an engine, play rounds and stop it.

    Args:
        model: Folder or hub name.
        dtype: Weights and arithmetic.
        concurrency: Requests at a time.
        console: Told how far it is; None for nobody.

    Raises:
        ServerError: The engine failed.
    """
    size = EngineSize(model, PROMPT_TOKENS + REQUEST_TOKENS, concurrency, dtype)
    config = {"method": METHOD, "num_speculative_tokens": max(LENGTHS)}
    with log_folder() as logs, exit_on_signals(), EngineGroup() as group:
        engine = launch_engine(group, METHOD, config, size, logs)
        engine.answer(START_TIMEOUT_S)
        rounds: dict[int, list[Mapping[str, Any]]] = {k: [] for k in LENGTHS}
        num_cycles = max(MIN_CYCLES, NUM_PROMPTS // concurrency)
        prompts = cycle(_prompts(engine, model, num_cycles * concurrency))
        for number in range(-1, num_cycles):
            if console is not None and number >= 0:
                console.print(f"probe: {number + 1} of {num_cycles}")
            served = list(islice(prompts, concurrency))
            for draft_length in LENGTHS:
                figures = _play(engine, served, draft_length, concurrency)
                if number >= 0:  # the first ones warm up
                    rounds[draft_length].append(figures)
    return conclude(rounds)


def _prompts(engine: EngineProcess, model: str, num_prompts: int) -> list[list[int]]:
    texts = [each.text for each in read_prompts(model, num_prompts)]
    tokenized = engine.ask("tokenize", texts=texts)["token_ids"]
    prompts = [ids[:PROMPT_TOKENS] for ids in tokenized if ids]
    if not prompts:
        raise ConfigError(
            f"model: the tokenizer of {model} knows no word of the prompts"
        )
    return prompts


def _play(
    engine: EngineProcess,
    prompts: Sequence[Sequence[int]],
    draft_length: int,
    concurrency: int,
) -> dict[str, Any]:
    sampling = {
        "temperature": 0.0,
        "max_tokens": REQUEST_TOKENS,
        "extra_args": {FLAT_KEY: draft_length},
    }
    wave = [{"prompt": list(prompt), "sampling": sampling} for prompt in prompts]
    engine.ask("begin", waves=[wave], concurrency=concurrency, is_split=True)
    while not engine.ask("step", seconds=WITHOUT_PAUSE_S)["is_done"]:
        pass
    return engine.ask("result")


def conclude(rounds: Mapping[int, Sequence[Mapping[str, Any]]]) -> ProbeResult:
    """What follows from the rounds.

    Args:
        rounds: Of each draft length, 0 first and the longest last, what the engine
            counted in each; those of the same number were played together.
    """
    longest = rounds[max(rounds)]
    num_drafts = sum(each["num_drafts"] for each in longest)
    positions = zip(*(each["accepted_per_position"] for each in longest), strict=True)
    survives = [sum(accepted) / max(1, num_drafts) for accepted in positions]
    base_s = median(map(_step_s, rounds[0]))
    lengths = []
    for draft_length, each in rounds.items():
        length = expected_acceptance_length(survives, draft_length)
        cost, draft_cost = (
            _typical_ratio(seconds, each, rounds[0]) for seconds in (_step_s, _draft_s)
        )
        lengths.append(
            LengthFigures(
                draft_length,
                length,
                base_s * cost,
                base_s * draft_cost,
                speedup(length, cost),
            )
        )
    return ProbeResult(survives, lengths)


def _typical_ratio(
    seconds: Callable[[Mapping[str, Any]], float],
    rounds: Sequence[Mapping[str, Any]],
    base_rounds: Sequence[Mapping[str, Any]],
) -> float:
    """Of seconds of a step to the whole step without drafts, pair by pair."""
    pairs = zip(rounds, base_rounds, strict=True)
    return median(seconds(each) / _step_s(base) for each, base in pairs)


def _step_s(figures: Mapping[str, Any]) -> float:
    return float(figures["decode_seconds"] / figures["decode_steps"])


def _draft_s(figures: Mapping[str, Any]) -> float:
    split = figures["decode_split_seconds"]
    return float(split["draft"] / figures["decode_steps"]) if split else 0.0
