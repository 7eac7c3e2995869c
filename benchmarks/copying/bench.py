"""What drafts that are copied from a request's own text bring, and what they cost.

Four engines serve the same greedy requests in turns: no speculation, `mtp_plus` without
and with ``copy_from_context``, and vLLM's own copying (`ngram`), which has no gate: it
verifies what followed a match whether or not copies have been right.

Before the rounds each engine answers every request once: these texts are compared, and
the share of copied tokens is counted in them (``copied.py``).

Result (JSON)::

    engines.<name>              speculative config
    cells[].load, .concurrency
           .engines.<name>.tokens_per_s        decode steps of full batches: median,
                                               quartiles
                          .acceptance_length   tokens committed for each verification
                                               of a request
                          .mean_draft_length   draft tokens for each
           .ratios.<over>.<under>              paired by repeat: geometric mean, 95 %
                                               interval by the bootstrap, each
    loads.<load>.prompt_tokens  mean
                .copied         shares of the answers' tokens, see ``copied.py``
                .num_equal      requests that all engines answered alike, num_requests
    identical_texts             of the rounds, too
    options, provenance
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, ClassVar

from rich.console import Console

from benchmarks.copying.copied import copied_share, count_copied
from benchmarks.copying.loads import (
    BEGUN_TOKENS,
    EDITS,
    LOADS,
    NOISE,
    PROSE,
    SEPARATOR,
    as_wave,
    edit_prompt,
    make_edits,
    noise_prompts,
    prose_prompts,
)
from benchmarks.copying.summary import print_report, summarise_cell
from benchmarks.grid.cells import Prompts
from benchmarks.grid.prose import PROSE as PROSE_TEXT
from benchmarks.harness import (
    SPARE_TOKENS,
    Contenders,
    Rounds,
    RoundsBench,
    Waves,
    play_rounds,
    texts_agree,
)
from examples.tiny_model import TINY_MODEL
from vllm_mtp.config import METHOD
from vllm_mtp.tools.engine_process import NO_SPECULATION, EngineGroup
from vllm_mtp.tools.option_checks import check_names, refuse
from vllm_mtp.tools.options import option
from vllm_mtp.tools.prompts import load_prompts

ALONE, COPYING, UNGATED = f"{METHOD} alone", METHOD, "ngram"
SEPARATOR_TOKENS = 32
"""Room for the separator with any tokenizer."""
CHARACTERS_OF_A_TOKEN = 8
"""More than any tokenizer has on average in code: files are cut by tokens."""
PROMPT_LOOKUP = {"prompt_lookup_min": 4, "prompt_lookup_max": 16}
"""Of vLLM's own copying: it begins behind as long a match as ours does at the least."""


@dataclass(frozen=True, kw_only=True)
class CopyingBench(RoundsBench):
    """Compare mtp_plus that copies from context with others, on three loads.

    edits: a file, then its beginning again with an identifier renamed; prose; noise.
    """

    command: ClassVar[str] = "copying"

    loads: tuple[str, ...] = option(tuple(LOADS), "Of: edits, prose, noise.")
    concurrency: tuple[int, ...] = option((1,), "Requests at a time.", 1, 256)
    requests: int = option(8, "Of a round.", 1, 256)
    request_tokens: int = option(128, "Of every answer.", 8, 4096)
    file_tokens: int = option(
        300, "Of a file that is edited; of a prompt of the other loads.", 64, 100_000
    )
    draft_tokens: int = option(16, "num_speculative_tokens of all that draft.", 1, 64)
    max_model_len: int | None = option(
        None, "Of the engines. Unset: what the longest request needs.", 128, 10**7
    )
    seed: int = option(0, "Of files, changes and noise.", 0, 10**9)

    def __post_init__(self) -> None:
        """Check every option; see `Options`."""
        super().__post_init__()
        check_names("loads", self.loads, tuple(LOADS))
        if self.max_model_len and self.max_model_len < self._needed_tokens:
            needed = f"at least {self._needed_tokens}, which the longest request needs"
            refuse("max-model-len", self.max_model_len, needed)

    @property
    def contenders(self) -> Contenders:
        """Speculative config of each."""
        most = {"num_speculative_tokens": self.draft_tokens}
        plus = {"method": METHOD, **most}
        return {
            NO_SPECULATION: None,
            ALONE: {**plus, "copy_from_context": False},
            COPYING: {**plus, "copy_from_context": True},
            UNGATED: {"method": "ngram", **PROMPT_LOOKUP, **most},
        }

    @property
    def most_requests(self) -> int:
        """At a time."""
        return max(self.concurrency)

    @property
    def longest_tokens(self) -> int:
        """Of an answer."""
        return self.request_tokens

    @property
    def _needed_tokens(self) -> int:
        prompt = self.file_tokens + SEPARATOR_TOKENS + BEGUN_TOKENS
        return prompt + self.request_tokens + self.draft_tokens + SPARE_TOKENS

    @property
    def room_tokens(self) -> int:
        """``max_model_len`` of the engines."""
        return self.max_model_len or self._needed_tokens

    def play(
        self, group: EngineGroup, prompts: Prompts, console: Console
    ) -> dict[str, Any]:
        """All loads, one after the other."""
        loads: dict[str, Any] = {}
        cells: list[dict[str, Any]] = []
        rounds_of_cells: dict[int, Rounds] = {}
        for load in self.loads:
            own = self.prompts_of(load, group, prompts.vocab_size)
            loads[load] = self._answered(own, group)
            for concurrency in self.concurrency:
                console.print(f"{load}, {concurrency} at a time", highlight=False)
                waves = self.waves(own)
                rounds = play_rounds(group, self, waves, concurrency, console)
                rounds_of_cells[len(cells)] = rounds
                cells.append(
                    {"load": load, "concurrency": concurrency}
                    | summarise_cell(rounds, tuple(self.contenders))
                )
        return {
            "engines": self.contenders,
            "loads": loads,
            "cells": cells,
            "identical_texts": texts_agree(rounds_of_cells),
        }

    def prompts_of(
        self, load: str, group: EngineGroup, vocab_size: int
    ) -> list[list[int]]:
        """Token ids of a load's prompts, one for each request of a round."""
        count, length = self.requests, self.file_tokens
        if load == NOISE:
            return noise_prompts(vocab_size, count, length, self.seed)
        engine = group.engines[NO_SPECULATION]
        if load == PROSE:
            (ids,) = engine.ask("tokenize", texts=[PROSE_TEXT])["token_ids"]
            return prose_prompts(ids, count, length)
        assert load == EDITS, load
        found = load_prompts(None, str(TINY_MODEL), None)
        texts = [prompt.plain_text for prompt in found]
        edits = make_edits(texts, count, CHARACTERS_OF_A_TOKEN * length, self.seed)
        both = [text for edit in edits for text in edit]
        separator, *ids = engine.ask("tokenize", texts=[SEPARATOR, *both])["token_ids"]
        pairs = zip(ids[::2], ids[1::2], strict=True)
        return [edit_prompt(old, separator, new, length) for old, new in pairs]

    def waves(self, prompts: Sequence[Sequence[int]]) -> Iterator[Waves]:
        """The same requests in every round."""
        return repeat([as_wave(prompts, self.request_tokens)])

    def _answered(
        self, prompts: Sequence[Sequence[int]], group: EngineGroup
    ) -> dict[str, Any]:
        """What of the answers is copied, and how many are the same from all engines."""
        wave = as_wave(prompts, self.request_tokens)
        answers = {}
        for name in self.contenders:
            said = group.engines[name].ask("generate", requests=wave)["answers"]
            answers[name] = [each["token_ids"] for each in said]
        target = answers[NO_SPECULATION]
        counts = list(map(count_copied, prompts, target))
        by_request = zip(*answers.values(), strict=True)
        alike = (len(set(map(tuple, each))) == 1 for each in by_request)
        return {
            "prompt_tokens": sum(map(len, prompts)) / len(prompts),
            "copied": copied_share(counts),
            "num_equal": sum(alike),
            "num_requests": len(prompts),
        }

    @staticmethod
    def show(result: Mapping[str, Any], console: Console) -> None:
        """A line for each engine in each cell."""
        print_report(result, console)
