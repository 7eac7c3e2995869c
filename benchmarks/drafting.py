"""What drafting gains from less to multiply by and from drawing like the target.

All contenders but the last draft the same fixed number of tokens, so that nothing but
their parts differs: vLLM's own `mtp`, and `mtp_plus` with the whole vocabulary, with a
part of it, with weights in 8 bits as well, and with all that is the default (also, on a
CPU, the target's head prefiltered in 8 bits). The last one is `mtp_plus` as it is
served, told nothing but that number: it may draft less and verify only what it is sure
of. Where requests are sampled, vLLM drafts greedily or draws with the temperature
alone. Every round has other prompts, so what a draft vocabulary has learnt is not what
is asked next.

Result (JSON)::

    cells.<concurrency>.<contender>.tokens_per_s        spread over the repeats
                                   .over_mtp            paired ratios to vLLM's `mtp`
                                   .acceptance_length
                                   .acceptance_per_position
                                   .draft_columns       tokens to draft from, at the end
    contenders.<name>       speculative config
    identical_texts         greedy and in float32 only, else null
    options, provenance
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from benchmarks.grid.cells import CODE, Prompts
from benchmarks.grid.summary import sums_by_position
from benchmarks.harness import (
    Bench,
    Contenders,
    Rounds,
    Waves,
    acceptance_length,
    full_speed,
    ratio_row,
    say_texts,
    spread_of,
    texts_agree,
)
from benchmarks.spread import Spread
from vllm_mtp.config import DEFAULT_FIXED_DRAFT_LENGTH, METHOD, VLLM_METHOD
from vllm_mtp.tools.engine_process import NO_SPECULATION
from vllm_mtp.tools.option_checks import refuse
from vllm_mtp.tools.options import option

BASELINE = VLLM_METHOD
MIN_REQUESTS = 8
"""Of a round."""
WHOLE_HEAD = {"verify_head": "whole"}
"""Of a contender that shows what drafting does alone."""
SAME_WEIGHTS = WHOLE_HEAD | {"draft_weights": "same"}
"""Of contenders that show what a draft vocabulary does alone."""
FREE = f"{METHOD}, free"
"""It chooses the draft length, up to that of the others."""


@dataclass(frozen=True, kw_only=True)
class DraftingBench(Bench):
    """Compare drafts: whole and small vocabulary, greedy and drawn, all at one K."""

    command: ClassVar[str] = "drafting"

    draft_length: int = option(
        DEFAULT_FIXED_DRAFT_LENGTH, "K of every contender.", 1, 8
    )
    concurrency: tuple[int, ...] = option((1, 8), "Requests at a time.", 1, 256)
    temperature: float = option(0.0, "Of sampling; 0 is greedy.", 0, 2)
    top_p: float = option(1.0, "Of sampling.")
    request_tokens: int = option(64, "Tokens of every request.", 2, 512)
    warm_ups: int = option(
        6, "Untimed rounds, in which the vocabulary is learnt.", 0, 100
    )
    turn_seconds: float = option(
        0.2,
        "How long a contender works before the next one's turn. Of a model of a few "
        "megabytes, which the caches hold, longer turns are fairer.",
        0.05,
        60.0,
    )
    draft_vocab: Path | None = option(None, "A list, for one more contender.")
    ablations: bool = option(
        True,
        "Also mtp_plus with the whole vocabulary, with weights as they are, and with "
        "the target's head whole.",
    )
    compiled: bool = option(
        False, "Let vLLM compile on a CPU, too, as a server does: minutes to start."
    )
    label: str = option("", "Part of the result's name.")

    def __post_init__(self) -> None:
        """Check every option; see `Options`."""
        super().__post_init__()
        if not 0 < self.top_p <= 1:
            refuse("top-p", self.top_p, "a number above 0, at most 1")

    @property
    def engine_args(self) -> dict[str, Any]:
        """Of all engines."""
        return {"enforce_eager": False} if self.compiled else {}

    @property
    def file_name(self) -> str:
        """First part of the result's name."""
        return f"{self.command}-{self.label}" if self.label else self.command

    @property
    def contenders(self) -> Contenders:
        """Speculative config of each."""
        theirs = {"method": VLLM_METHOD, "num_speculative_tokens": self.draft_length}
        ours = theirs | {"method": METHOD, "controller": "fixed"}
        drawn: Contenders = {}
        if self.temperature:
            probabilistic = {"draft_sample_method": "probabilistic"}
            singly = {"rejection_sample_method": "standard"}
            drawn[f"{VLLM_METHOD}, drawn"] = theirs | probabilistic
            drawn[f"{METHOD}, tested singly"] = ours | singly
        unrounded = ours | SAME_WEIGHTS
        listed = {}
        if self.draft_vocab is not None:
            path = str(self.draft_vocab.resolve())
            listed[f"{METHOD}, list"] = unrounded | {"draft_vocab": path}
        whole = {f"{METHOD}, full": unrounded | {"draft_vocab": "full"}}
        alone = {
            f"{METHOD}, same weights": unrounded,
            f"{METHOD}, whole head": ours | WHOLE_HEAD,
        }
        return {
            NO_SPECULATION: None,
            BASELINE: theirs,
            **drawn,
            **(whole if self.ablations else {}),
            **listed,
            **(alone if self.ablations else {}),
            METHOD: ours,
            FREE: {key: ours[key] for key in ours if key != "controller"},
        }

    @property
    def cells(self) -> Sequence[int]:
        """Requests at a time."""
        return self.concurrency

    @property
    def longest_tokens(self) -> int:
        """Of an answer."""
        return self.request_tokens

    def waves(self, prompts: Prompts, concurrency: int) -> Iterator[Waves]:
        """Rounds of 8 requests, or one for each seat; new prompts while there are."""
        own = cycle(prompts.own[CODE])
        sampling = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.request_tokens,
        }
        num_requests = max(MIN_REQUESTS, *self.concurrency)
        while True:
            yield [
                [
                    {"prompt": list(prompt), "sampling": sampling}
                    for prompt in islice(own, num_requests)
                ]
            ]

    def summarise(self, cells: Mapping[int, Rounds]) -> dict[str, Any]:
        """See the top of this file."""
        is_exact = self.temperature == 0 and self.dtype == "float32"
        return {
            "cells": {
                str(concurrency): {
                    name: _summarise(name, rounds) for name in self.contenders
                }
                for concurrency, rounds in cells.items()
            },
            "contenders": self.contenders,
            "identical_texts": texts_agree(cells) if is_exact else None,
        }

    @staticmethod
    def show(result: Mapping[str, Any], console: Console) -> None:
        """A table for each concurrency."""
        for concurrency, cell in result["cells"].items():
            table = Table(title=f"{concurrency} requests at a time")
            columns = ("contender", "tokens/s", "of mtp", "quartiles", "acc. length")
            for column in (*columns, "accepted by position", "head"):
                table.add_column(column, justify="right" if "/" in column else "left")
            for name, figures in cell.items():
                table.add_row(
                    name,
                    f"{figures['tokens_per_s']['median']:.1f}",
                    *ratio_row(figures["over_mtp"]),
                    f"{figures['acceptance_length']:.3f}",
                    " ".join(f"{p:.2f}" for p in figures["acceptance_per_position"]),
                    str(figures.get("draft_columns") or ""),
                )
            console.print(table)
        say_texts(result, console)


def _summarise(name: str, rounds: Rounds) -> dict[str, Any]:
    own = [each[name] for each in rounds]
    speed = spread_of(rounds, name, full_speed)
    baseline = spread_of(rounds, BASELINE, full_speed)
    return {
        "tokens_per_s": speed.as_json(),
        "over_mtp": Spread.of_ratio(speed, baseline).as_json(),
        "acceptance_length": acceptance_length(own),
        "acceptance_per_position": [
            accepted / max(1, drafted)
            for accepted, drafted in zip(
                sums_by_position(each["accepted_per_position"] for each in own),
                sums_by_position(each["drafted_per_position"] for each in own),
                strict=True,
            )
        ],
        "draft_columns": own[-1].get("draft_columns"),
    }
