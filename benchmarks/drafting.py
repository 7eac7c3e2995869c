"""What drafting gains from less to multiply by and from drawing like the target.

All contenders but the last draft the same fixed number of tokens, so that nothing but
their parts differs: vLLM's own `mtp`, and `mtp_plus` with the whole vocabulary,
with a part of it, with weights in 8 bits as well, and with all that is the default:
that and, on a CPU, a prefiltered head of the target. The last one is `mtp_plus` as it
is served, told nothing but that number: it may draft less and verify only what it is
sure of. Where requests are sampled, vLLM drafts greedily or draws with the temperature
alone. All serve the same requests in short turns (`grid_turns`); every round has
other prompts, so what a draft vocabulary has learnt is not what is asked next.

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

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.grid.cells import CODE, Prompts
from benchmarks.grid.engines import BenchGroup, play_together
from benchmarks.grid.summary import sums_by_position
from benchmarks.options import DTYPES, check_numbers, check_output_folder, machine_slug
from benchmarks.small_group import room_for, start_engines
from benchmarks.spread import Spread
from examples.tiny_model import TINY_MODEL
from vllm_mtp.config import METHOD, VLLM_METHOD
from vllm_mtp.tools.engine_arguments import EngineSize
from vllm_mtp.tools.engine_process import NO_SPECULATION, EngineGroup
from vllm_mtp.tools.option_checks import check_fields, check_name, refuse, resolve_model
from vllm_mtp.tools.provenance import collect_provenance, write_json
from vllm_mtp.tools.server_process import exit_on_signals, log_folder

MAX_CONCURRENCY = 256
MAX_REQUEST_TOKENS = 512
MAX_ROUNDS = 100
MAX_TEMPERATURE = 2.0
MIN_TURN_S, MAX_TURN_S = 0.05, 60.0
BASELINE = VLLM_METHOD
WHOLE_HEAD = {"verify_head": "whole"}
"""Of a contender that shows what drafting does alone."""
SAME_WEIGHTS = WHOLE_HEAD | {"draft_weights": "same"}
"""Of contenders that show what a draft vocabulary does alone."""
FREE = f"{METHOD}, free"
"""It chooses the draft length, up to that of the others."""

Figures = Mapping[str, Any]


@dataclass(frozen=True)
class DraftingOptions:
    """What the user chose.

    Attributes:
        model: Folder or hub name.
        draft_length: K of every contender; the most of the one that is free.
        concurrencies: Requests at a time.
        temperature: Of sampling; 0 is greedy.
        top_p: Of sampling.
        request_tokens: Tokens of every request.
        num_warm_ups: Untimed rounds, in which the vocabulary is learnt.
        num_repeats: Timed rounds of each contender and concurrency.
        turn_seconds: How long an engine works before the next one's turn.
        dtype: Weights and arithmetic.
        draft_vocab: A list, for one more contender.
        ablations: Whether `mtp_plus` also comes without its parts: with the whole
            vocabulary, with weights as they are, and with the target's head whole.
            Three engines more.
        compiled: Let vLLM compile on a CPU, too, as it does unless told otherwise:
            minutes for each engine.
        label: Part of the result's name.
        output: Folder for the result.
    """

    model: str = str(TINY_MODEL)
    draft_length: int = 3
    concurrencies: tuple[int, ...] = (1, 8)
    temperature: float = 0.0
    top_p: float = 1.0
    request_tokens: int = 64
    num_warm_ups: int = 6
    num_repeats: int = 5
    turn_seconds: float = 0.2
    dtype: str = "float32"
    draft_vocab: Path | None = None
    ablations: bool = True
    compiled: bool = False
    label: str = ""
    output: Path = Path()

    def __post_init__(self) -> None:
        """Check every option.

        Raises:
            ConfigError: One of them has a value that is not allowed.
        """
        check_fields(
            self,
            {
                "draft_length": (1, 8),
                "temperature": (0, MAX_TEMPERATURE),
                "request_tokens": (2, MAX_REQUEST_TOKENS),
                "num_warm_ups": (0, MAX_ROUNDS),
                "num_repeats": (1, MAX_ROUNDS),
                "turn_seconds": (MIN_TURN_S, MAX_TURN_S),
            },
        )
        if not 0 < self.top_p <= 1:
            refuse("top-p", self.top_p, "a number above 0, at most 1")
        check_name("dtype", self.dtype, DTYPES)
        check_numbers("concurrency", self.concurrencies, (1, MAX_CONCURRENCY))
        check_output_folder(self.output)

    @property
    def is_exact(self) -> bool:
        """Whether all texts must agree: in a shorter format near-ties may flip."""
        return self.temperature == 0 and self.dtype == "float32"

    @property
    def sampling(self) -> dict[str, Any]:
        """Of every request."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.request_tokens,
        }

    @property
    def contenders(self) -> dict[str, dict[str, Any] | None]:
        """Speculative config of each."""
        theirs = {
            "method": VLLM_METHOD,
            "num_speculative_tokens": self.draft_length,
        }
        ours = {
            "method": METHOD,
            "num_speculative_tokens": self.draft_length,
            "controller": "fixed",
        }
        drawn: dict[str, dict[str, Any] | None] = {}
        if self.temperature:
            drawn[f"{VLLM_METHOD}, drawn"] = theirs | {
                "draft_sample_method": "probabilistic"
            }
            drawn[f"{METHOD}, tested singly"] = ours | {
                "rejection_sample_method": "standard"
            }
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


def run_drafting_bench(options: DraftingOptions, console: Console) -> dict[str, Any]:
    """Measure, print and write.

    Args:
        options: What the user chose.
        console: Where to print.

    Returns:
        The result as it was written.

    Raises:
        ServerError: An engine failed.
    """
    model = resolve_model(options.model)
    most = max(options.concurrencies)
    cells = {}
    with log_folder() as logs, exit_on_signals(), BenchGroup() as group:
        longest = room_for(options.request_tokens)
        size = EngineSize(model, longest, most, options.dtype)
        compiled = {"enforce_eager": False} if options.compiled else {}
        prompts = start_engines(group, options.contenders, size, logs, **compiled)
        waves = draw_waves(prompts, options)
        for concurrency in options.concurrencies:
            console.print(f"{concurrency} requests at a time", highlight=False)
            cells[concurrency] = _play(group, waves, concurrency, options, console)
    result = summarise_drafting(options, cells)
    machine = machine_slug(result["provenance"]["hardware"])
    label = f"-{options.label}" if options.label else ""
    path = options.output / f"drafting{label}-{machine}.json"
    write_json(path, result)
    print_drafting(result, console)
    console.print(f"Written: {path}", markup=False)
    return result


def draw_waves(
    prompts: Prompts, options: DraftingOptions
) -> Iterator[list[dict[str, Any]]]:
    """Rounds of 8 requests, or one for each seat; new prompts as long as there are."""
    own = cycle(prompts.own[CODE])
    num_requests = max(8, *options.concurrencies)
    while True:
        yield [
            {"prompt": list(prompt), "sampling": options.sampling}
            for prompt in islice(own, num_requests)
        ]


def _play(
    group: EngineGroup,
    waves: Iterator[list[dict[str, Any]]],
    concurrency: int,
    options: DraftingOptions,
    console: Console,
) -> list[Mapping[str, Figures]]:
    names = list(group.engines)
    rounds: list[Mapping[str, Figures]] = []
    for number in range(options.num_warm_ups + options.num_repeats):
        repeat = number - options.num_warm_ups
        what = f"warm-up {number + 1}" if repeat < 0 else f"repeat {repeat + 1}"
        console.print(what, highlight=False)
        shift = number % len(names)
        in_turn = [*names[shift:], *names[:shift]]
        played = play_together(
            group, in_turn, [next(waves)], concurrency, turn_s=options.turn_seconds
        )
        if repeat >= 0:
            rounds.append(played)
    return rounds


def summarise_drafting(
    options: DraftingOptions, cells: Mapping[int, Sequence[Mapping[str, Figures]]]
) -> dict[str, Any]:
    """The result, from what each engine counted in each round."""
    texts_agree = all(
        len({figures["texts_sha256"] for figures in each.values()}) == 1
        for rounds in cells.values()
        for each in rounds
    )
    return {
        "cells": {
            str(concurrency): {
                name: _summarise([each[name] for each in rounds], rounds)
                for name in options.contenders
            }
            for concurrency, rounds in cells.items()
        },
        "contenders": options.contenders,
        "identical_texts": texts_agree if options.is_exact else None,
        "options": asdict(options)
        | {
            "output": str(options.output),
            "draft_vocab": options.draft_vocab and options.draft_vocab.name,
        },
        "provenance": collect_provenance(sys.argv),
    }


def _summarise(
    own: Sequence[Figures], rounds: Sequence[Mapping[str, Figures]]
) -> dict[str, Any]:
    speed = Spread.of([_speed(each) for each in own])
    baseline = Spread.of([_speed(each[BASELINE]) for each in rounds])
    request_steps = sum(each["decode_request_steps"] for each in own)
    return {
        "tokens_per_s": speed.as_json(),
        "over_mtp": Spread.of_ratio(speed, baseline).as_json(),
        "acceptance_length": sum(each["decode_tokens"] for each in own) / request_steps,
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


def _speed(figures: Figures) -> float:
    return float(figures["full_tokens"] / figures["full_seconds"])


def print_drafting(result: Mapping[str, Any], console: Console) -> None:
    """A table for each concurrency."""
    for concurrency, cell in result["cells"].items():
        table = Table(title=f"{concurrency} requests at a time")
        columns = ("contender", "tokens/s", "of mtp", "quartiles", "acc. length")
        for column in (*columns, "accepted by position", "head"):
            table.add_column(column, justify="right" if "/" in column else "left")
        for name, figures in cell.items():
            ratio = figures["over_mtp"]
            table.add_row(
                name,
                f"{figures['tokens_per_s']['median']:.1f}",
                f"{ratio['median']:.3f}",
                "{:.2f}..{:.2f}".format(*ratio["quartiles"]),
                f"{figures['acceptance_length']:.3f}",
                " ".join(f"{p:.2f}" for p in figures["acceptance_per_position"]),
                str(figures.get("draft_columns") or ""),
            )
        console.print(table)
    if result["identical_texts"] is not None:
        same = "the same" if result["identical_texts"] else "DIFFERENT"
        console.print(f"Greedy texts: {same} from all contenders")
