"""What drafting would gain on this machine: tried with one engine and some prompts.

Requests pin their draft length (`request_options`), so one engine serves all of them; a
pinned 0 costs what no speculation costs, except where steps are so short that the
plugin's own work in each of them counts: there a second engine, without speculation,
measures K = 0. For each K the prediction is ``L(K) / (t(K) / t(0))``: acceptance length
``L(K) = 1 + S_1 + .. + S_K`` over the measured step time. Step times need few prompts,
served with every K one right after the other, since a shared machine changes its speed.
Survival needs many prompts, and only the longest drafts.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from vllm_mtp.acceptance import Interval, expected_acceptance_length, speedup
from vllm_mtp.config import METHOD, ConfigError
from vllm_mtp.request_options import FLAT_KEY
from vllm_mtp.tools.engine_arguments import EngineSize
from vllm_mtp.tools.engine_process import (
    NO_SPECULATION,
    START_TIMEOUT_S,
    EngineGroup,
    EngineProcess,
)
from vllm_mtp.tools.eval_backends import tokenize_prompts
from vllm_mtp.tools.prompts import load_prompts
from vllm_mtp.tools.server_process import exit_on_signals, log_folder

LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8)
NUM_CYCLES = 12
"""Rounds with every draft length, for step times."""
MAX_PROMPTS = 96
MAX_SECONDS = 120.0
"""Of further rounds with the longest drafts, for survival."""
PROMPT_TOKENS, REQUEST_TOKENS = 256, 64
SHORT_STEP_S = 0.01
NEXT_TO_NOTHING = 0.1
"""First-position acceptance that no intact MTP layer has on ordinary text."""
_AS_GOOD = 0.98
"""Of the best prediction: no difference that a probe would show."""
_NUM_RESAMPLES = 2000
_TAILS = (0.025, 0.975)

Rounds = Sequence[Mapping[str, Any]]
Waves = Sequence[Sequence[Sequence[int]]]
"""Token ids of the prompts that are served at a time."""


class LengthFigures(NamedTuple):
    """Of one draft length."""

    draft_length: int
    acceptance_length: float
    step_seconds: float
    draft_seconds: float
    """Within a step; 0 where the runner cannot be split."""
    predicted_speedup: float
    interval: Interval
    """95 %, of the prediction: other prompts and other moments of the machine."""


@dataclass(frozen=True)
class ProbeResult:
    """What was seen, and what follows."""

    survival: list[float]
    num_drafts: int
    """That survival was seen on."""
    lengths: list[LengthFigures]

    @property
    def best(self) -> LengthFigures:
        """The fastest; the shortest draft among those that are as fast."""
        enough = _AS_GOOD * max(each.predicted_speedup for each in self.lengths)
        return next(each for each in self.lengths if each.predicted_speedup >= enough)

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
            "num_drafts": self.num_drafts,
            "lengths": [each._asdict() for each in self.lengths],
            "best_draft_length": self.best.draft_length,
            "predicted_speedup": self.best.predicted_speedup,
            "interval": self.best.interval,
            "draft_cost": self.draft_cost,
            "formula": "(1 + S_1 + .. + S_K) / (t(K) / t(0))",
        }


def run_probe(
    model: str,
    speculation: Mapping[str, Any],
    dtype: str,
    concurrency: int,
    console: Console | None,
) -> ProbeResult:
    """Start an engine, play rounds and stop it.

    Args:
        model: Folder or hub name.
        speculation: Speculative config, without a draft length.
        dtype: Weights and arithmetic.
        concurrency: Requests at a time.
        console: Told how far it is; None for nobody.

    Raises:
        ConfigError: The checkpoint brings prompts that cannot be read, or a tokenizer
            that knows none of their words.
        ServerError: The engine failed.
    """
    size = EngineSize(model, PROMPT_TOKENS + REQUEST_TOKENS, concurrency, dtype)
    config = {**speculation, "num_speculative_tokens": max(LENGTHS)}
    prompts = load_prompts(None, model, None)
    # The built-in ones come category by category.
    random.Random(0).shuffle(prompts)
    with log_folder() as logs, exit_on_signals(), EngineGroup() as group:
        engine = group.launch(METHOD, config, size, logs)
        engine.answer(START_TIMEOUT_S)
        ids = tokenize_prompts(engine, prompts[:MAX_PROMPTS])
        # The end of a conversation is where the answer begins.
        fitting = [each[-PROMPT_TOKENS:] for each in ids if each]
        if not fitting:
            raise ConfigError(
                f"model: the tokenizer of {model} knows no word of the prompts"
            )
        waves = [
            list(islice(cycle(fitting), first, first + concurrency))
            for first in range(0, len(fitting), concurrency)
        ]
        console = console or Console(quiet=True)
        without = engine
        if _step_s(_play(engine, waves[0], 0)) < SHORT_STEP_S:
            without = group.launch(NO_SPECULATION, None, size, logs)
            without.answer(START_TIMEOUT_S)
        engines = {k: engine if k else without for k in LENGTHS}
        rounds = _play_every_length(engines, waves, console)
        further = _play_longest(engine, waves[NUM_CYCLES:], console)
    return conclude(rounds, further)


def _play_every_length(
    engines: Mapping[int, EngineProcess], waves: Waves, console: Console
) -> dict[int, list[Mapping[str, Any]]]:
    rounds: dict[int, list[Mapping[str, Any]]] = {k: [] for k in LENGTHS}
    first_too = [waves[0], *islice(cycle(waves), NUM_CYCLES)]
    for number, wave in enumerate(first_too):
        console.print(f"probe: {number} of {NUM_CYCLES} rounds with every draft length")
        for draft_length in LENGTHS:
            figures = _play(engines[draft_length], wave, draft_length)
            if number:  # the first ones warm up
                rounds[draft_length].append(figures)
    return rounds


def _play_longest(
    engine: EngineProcess, waves: Waves, console: Console
) -> list[Mapping[str, Any]]:
    rounds: list[Mapping[str, Any]] = []
    end_s = time.monotonic() + MAX_SECONDS
    console.print(
        f"probe: up to {len(waves)} more rounds with {max(LENGTHS)} draft tokens"
    )
    for wave in waves:
        if time.monotonic() > end_s:
            break
        rounds.append(_play(engine, wave, max(LENGTHS)))
    return rounds


def _play(
    engine: EngineProcess, prompts: Sequence[Sequence[int]], draft_length: int
) -> dict[str, Any]:
    sampling = {
        "temperature": 0.0,
        "max_tokens": REQUEST_TOKENS,
        "extra_args": {FLAT_KEY: draft_length},
    }
    wave = [{"prompt": list(prompt), "sampling": sampling} for prompt in prompts]
    return engine.ask("generate", requests=wave, times_drafting=True)


def conclude(rounds: Mapping[int, Rounds], further: Rounds) -> ProbeResult:
    """What follows from the rounds.

    Args:
        rounds: Of each draft length, 0 first and the longest last, what the engine
            counted in each; those of the same number were played together.
        further: More of them with the longest drafts.
    """
    seen = [*rounds[max(rounds)], *further]
    num_drafts = sum(each["num_drafts"] for each in seen)
    positions = zip(*(each["accepted_per_position"] for each in seen), strict=True)
    survives = [sum(accepted) / max(1, num_drafts) for accepted in positions]
    base_s = median(map(_step_s, rounds[0]))
    lengths = []
    for draft_length, each in rounds.items():
        length = expected_acceptance_length(survives, draft_length)
        ratios = _ratios(_step_s, each, rounds[0])
        cost = median(ratios)
        lengths.append(
            LengthFigures(
                draft_length,
                length,
                base_s * cost,
                base_s * median(_ratios(_draft_s, each, rounds[0])),
                speedup(length, cost),
                _interval(seen, draft_length, ratios),
            )
        )
    return ProbeResult(survives, num_drafts, lengths)


def _ratios(
    seconds: Callable[[Mapping[str, Any]], float], rounds: Rounds, base_rounds: Rounds
) -> list[float]:
    """Of seconds of a step to the whole step without drafts, pair by pair."""
    pairs = zip(rounds, base_rounds, strict=True)
    return [seconds(each) / _step_s(base) for each, base in pairs]


def _interval(seen: Rounds, draft_length: int, ratios: Sequence[float]) -> Interval:
    """Of the prediction, by resampling rounds and pairs of step times."""
    accepted = np.array([sum(e["accepted_per_position"][:draft_length]) for e in seen])
    drafts = np.array([each["num_drafts"] for each in seen])
    generator = np.random.default_rng(0)
    some = generator.integers(0, len(seen), (_NUM_RESAMPLES, len(seen)))
    times = generator.integers(0, len(ratios), (_NUM_RESAMPLES, len(ratios)))
    lengths = 1 + accepted[some].sum(axis=1) / np.maximum(1, drafts[some].sum(axis=1))
    predictions = lengths / np.median(np.array(ratios)[times], axis=1)
    return Interval(*np.quantile(predictions, _TAILS).tolist())


def _step_s(figures: Mapping[str, Any]) -> float:
    return float(figures["decode_seconds"] / figures["decode_steps"])


def _draft_s(figures: Mapping[str, Any]) -> float:
    return (figures["draft_seconds"] or 0.0) / float(figures["decode_steps"])
