"""The cells of the grid and the requests of a round. Pure: nothing is started."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

from benchmarks.grid.options import GridOptions
from vllm_mtp.config import ConfigError
from vllm_mtp.tools.option_checks import refuse

PROMPT_TOKENS = 65
"""Of every request, after the context that all share."""

MIN_PROMPT_TOKENS = 16
MAX_REQUEST_TOKENS = 256
MIN_REQUEST_TOKENS = 40
"""A shorter request is mostly beginning and end, which speculation does not change."""
MIN_PHASE_TOKENS = 32
MIN_TEXTS = 8
MIN_TEXTS_OF_BATCH = 32
"""In a round of requests that accept drafts, one at a time or several: texts differ, so
few of them make ratios scatter from round to round."""
PHASE_ROUNDS = 1.5
"""A round with phases is so much longer than others: it holds two loads."""

GOLDEN_RATIO = (5**0.5 - 1) / 2

CODE, PROSE, CONSTRAINED, PHASES = "code", "prose", "constrained", "phases"


@dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    workload: str
    concurrency: int
    temperature: float
    context: str

    @property
    def name(self) -> str:
        """Unique within a grid, and what the user reads."""
        return (
            f"{self.workload} c={self.concurrency} T={self.temperature:g} "
            f"{self.context}"
        )

    @property
    def waves(self) -> tuple[str, ...]:
        """The workload of each wave: a wave begins when the one before is over."""
        if self.workload != PHASES:
            return (self.workload,)
        # Many requests at a time make long waves: then one change within a round,
        # and the next at the start of the following round.
        num_changes = 2 if self.concurrency < 8 else 1
        return (CODE, CONSTRAINED) * num_changes

    @property
    def wave_requests(self) -> int:
        """Requests of a wave."""
        if self.workload in (CODE, PROSE):
            if self.concurrency == 1:
                return MIN_TEXTS
            return max(2 * self.concurrency, MIN_TEXTS_OF_BATCH)
        return self.concurrency if self.workload == PHASES else 2 * self.concurrency

    @property
    def num_requests(self) -> int:
        """Requests of a round."""
        return len(self.waves) * self.wave_requests

    @property
    def warm_up_tokens(self) -> int:
        """Tokens of a request in a round that is not for the ratios."""
        return 24 if self.concurrency < 8 else 12

    def request_tokens(self, none_tokens_per_s: float, round_seconds: float) -> int:
        """Tokens that each request generates, the same for all contenders."""
        is_phases = self.workload == PHASES
        seconds = round_seconds * (PHASE_ROUNDS if is_phases else 1.0)
        lowest = MIN_PHASE_TOKENS if is_phases else MIN_REQUEST_TOKENS
        tokens = round(none_tokens_per_s * seconds / self.num_requests)
        return min(MAX_REQUEST_TOKENS, max(lowest, tokens))


def plan_cells(options: GridOptions) -> list[Cell]:
    """All cells, in the order in which they are measured."""
    return [
        Cell(workload, concurrency, temperature, context)
        for context, concurrency, temperature, workload in product(
            options.contexts,
            options.concurrencies,
            options.temperatures,
            options.workloads,
        )
    ]


def max_model_len_tokens(options: GridOptions) -> int:
    """Longest request of the grid."""
    longest = options.long_context_tokens if "long" in options.contexts else 0
    return longest + PROMPT_TOKENS + MAX_REQUEST_TOKENS


def check_context(model: str, options: GridOptions) -> None:
    """Whether the longest request fits into the model.

    Raises:
        ConfigError: It does not.
    """
    path = Path(model) / "config.json"
    limit = path.is_file() and json.loads(path.read_text()).get(
        "max_position_embeddings"
    )
    if limit and max_model_len_tokens(options) > limit:
        most = limit - PROMPT_TOKENS - MAX_REQUEST_TOKENS
        refuse(
            "long-context",
            options.long_context_tokens,
            f"at most {most}: the model has {limit} positions, and a request needs up "
            f"to {PROMPT_TOKENS + MAX_REQUEST_TOKENS} more",
        )


@dataclass(frozen=True)
class Prompts:
    """Token ids from which all rounds take their prompts.

    Attributes:
        own: Of each workload, prompts of a request each.
        contexts: Of each workload, what precedes all of them in ``long`` cells.
        vocab_size: Of the model.
    """

    own: Mapping[str, Sequence[Sequence[int]]]
    contexts: Mapping[str, Sequence[int]]
    vocab_size: int


def make_prompts(
    code: Sequence[Sequence[int]],
    prose: Sequence[int],
    vocab_size: int,
    options: GridOptions,
) -> Prompts:
    """Cut texts into prompts.

    Raises:
        ConfigError: The tokenizer leaves nothing long enough.
    """
    long_enough = [ids[:PROMPT_TOKENS] for ids in code if len(ids) >= PROMPT_TOKENS]
    count = 2 * max(options.concurrencies)
    stride = max(1, (len(prose) - PROMPT_TOKENS) // count)
    starts = range(0, len(prose) - MIN_PROMPT_TOKENS, stride)
    windows = [prose[start : start + PROMPT_TOKENS] for start in starts]
    if not long_enough or not windows:
        raise ConfigError(
            f"model: its tokenizer leaves no bundled prompt of {PROMPT_TOKENS} tokens"
        )
    length = options.long_context_tokens
    all_code = [token for ids in reversed(code) for token in ids]
    prose_context = list(islice(cycle(prose), length))
    return Prompts(
        own={CODE: long_enough, PROSE: windows, CONSTRAINED: windows},
        contexts={
            CODE: list(islice(cycle(all_code), length)),
            PROSE: prose_context,
            CONSTRAINED: prose_context,
        },
        vocab_size=vocab_size,
    )


def contexts_of(cell: Cell, prompts: Prompts) -> list[list[int]]:
    """What prompts of a cell have in common, for each of its workloads."""
    if cell.context != "long":
        return []
    return [list(prompts.contexts[workload]) for workload in dict.fromkeys(cell.waves)]


def make_warm_up_waves(cell: Cell, prompts: Prompts) -> list[list[dict[str, Any]]]:
    """A wave of each workload, short: enough to fill the cell's seats."""
    num_requests = max(cell.concurrency, 2)
    num_workloads = len(set(cell.waves))  # they take turns from the beginning
    waves = make_waves(cell, prompts, cell.warm_up_tokens)
    return [wave[:num_requests] for wave in waves[:num_workloads]]


def of_different_lengths(
    waves: Sequence[Sequence[Mapping[str, Any]]],
) -> list[list[dict[str, Any]]]:
    """The same requests, of half as many tokens to half as many again.

    Where all are equally long those without speculation end together and the next
    prompts are computed together: that saves them steps, and no server has such luck.
    """
    return [[_lengthened(*each) for each in enumerate(wave)] for wave in waves]


def _lengthened(place: int, request: Mapping[str, Any]) -> dict[str, Any]:
    sampling = request["sampling"]
    # Multiples of the golden ratio lie evenly, wherever they end.
    tokens = round(sampling["max_tokens"] * (0.5 + place * GOLDEN_RATIO % 1))
    tokens = min(tokens, MAX_REQUEST_TOKENS)
    return {**request, "sampling": {**sampling, "max_tokens": tokens}}


def make_waves(
    cell: Cell, prompts: Prompts, request_tokens: int, round_number: int = 0
) -> list[list[dict[str, Any]]]:
    """Requests of a round as an engine is given them.

    Args:
        cell: Where in the grid.
        prompts: Of the grid.
        request_tokens: How many tokens each request generates.
        round_number: Every round has other prompts, as far as there are any: on texts
            that are always the same the best static K would be the best of these texts.
    """
    waves = []
    first_ever = round_number * cell.num_requests
    num_used = dict.fromkeys(cell.waves, first_ever)
    for workload in cell.waves:
        first = num_used[workload]
        num_used[workload] = first + cell.wave_requests
        own = cycle(prompts.own[workload])
        context = prompts.contexts[workload] if cell.context == "long" else ()
        sampling: dict[str, Any] = {
            "temperature": cell.temperature,
            "max_tokens": request_tokens,
        }
        if workload == CONSTRAINED:
            last = prompts.vocab_size - 1
            sampling["allowed_range"] = [prompts.vocab_size // 2, last]
        waves.append(
            [
                {"prompt": [*context, *prompt], "sampling": sampling}
                for prompt in islice(own, first, first + cell.wave_requests)
            ]
        )
    return waves
