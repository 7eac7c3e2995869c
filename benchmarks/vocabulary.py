"""Does a draft vocabulary that the server learns do as well as one made beforehand?

The same greedy requests, round by round, for three engines that draft K tokens: from
the whole vocabulary, from the one that the server learns (``auto``), and from a list
made of exactly the traffic that was served first. That traffic is Python; after rounds
of more Python, with other prompts, prose follows, which nobody announces.

Result (JSON)::

    rounds[].domain, .is_learning, .num_tokens          (before the round)
            .acceptance_length.<contender>
    in_domain.auto_over_list, .auto_over_full           after the learning rounds
    other_domain.first, .last: the same ratios          first and last round of prose
    num_rows, options, provenance
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.grid.cells import CODE, PROMPT_TOKENS, PROSE
from benchmarks.grid.engines import BenchGroup, cut_prompts
from benchmarks.grid.options import GridOptions
from benchmarks.harness import Measurement
from vllm_mtp.config import AUTO, FULL, METHOD
from vllm_mtp.tools.engine_arguments import EngineSize
from vllm_mtp.tools.engine_process import START_TIMEOUT_S, EngineProcess
from vllm_mtp.tools.option_checks import resolve_model
from vllm_mtp.tools.options import option
from vllm_mtp.tools.provenance import replacing
from vllm_mtp.tools.server_process import exit_on_signals, log_folder

LISTED = "list"
CONTENDERS = (FULL, AUTO, LISTED)
LIST_FILE = "list.json"
DPI = 130


@dataclass(frozen=True, kw_only=True)
class VocabularyBench(Measurement):
    """Compare the vocabulary that a server learns with a list and with all tokens.

    Acceptance length on Python, then on prose that nobody has announced.
    """

    command: ClassVar[str] = "vocabulary"

    draft_length: int = option(3, "K of every contender.", 1, 8)
    concurrency: int = option(16, "Requests of a round, all at a time.", 1, 64)
    request_tokens: int = option(192, "Tokens of every request.", 8, 512)
    learning_tokens: int = option(
        20_000, "Committed before anything is compared.", 0, 10**7
    )
    num_rounds: int = option(
        4, "Compared rounds of each domain.", 1, 100, name="rounds"
    )
    rows: int | None = option(
        None,
        "Of list and auto. Unset: the default for the vocabulary.",
        128,
        2**20,
    )

    @property
    def num_learning_rounds(self) -> int:
        """Rounds until so many tokens are committed."""
        return -(-self.learning_tokens // (self.concurrency * self.request_tokens))

    @property
    def domains(self) -> list[str]:
        """Of all rounds."""
        return [CODE] * (self.num_learning_rounds + self.num_rounds) + [
            PROSE
        ] * self.num_rounds

    def speculative_config(self, contender: str, folder: Path) -> dict[str, Any]:
        """Of an engine; the list lies in ``folder``."""
        listed = str(folder / LIST_FILE)
        config = {
            "method": METHOD,
            "num_speculative_tokens": self.draft_length,
            "controller": "fixed",
            "draft_vocab": listed if contender == LISTED else contender,
        }
        if contender == AUTO and self.rows is not None:
            config["draft_vocab_size"] = self.rows
        return config

    def measure(self, console: Console) -> dict[str, Any]:
        """One engine after the other; the list is made of the first one's texts."""
        model = resolve_model(self.model)
        size = EngineSize(model, PROMPT_TOKENS + self.request_tokens, self.concurrency)
        lengths: dict[str, list[float]] = {}
        num_rows = 0
        with log_folder() as logs, exit_on_signals():
            for contender in CONTENDERS:
                config = self.speculative_config(contender, logs)
                with BenchGroup() as group:
                    engine = group.launch(contender, config, size, logs)
                    facts = engine.answer(START_TIMEOUT_S)
                    played = _play(engine, facts["vocab_size"], self, console)
                lengths[contender] = [length for length, _ in played]
                if contender == FULL:
                    learnt = played[: self.num_learning_rounds]
                    tokens = [each for _, each in learnt]
                    num_rows = _write_list(model, tokens, self.rows, logs)
        return self.summarise(lengths, num_rows)

    def summarise(
        self, lengths: Mapping[str, Sequence[float]], num_rows: int
    ) -> dict[str, Any]:
        """See the top of this file."""
        learning, compared = self.num_learning_rounds, self.num_rounds
        tokens_per_round = self.concurrency * self.request_tokens
        in_domain = slice(learning, learning + compared)
        return {
            "rounds": [
                {
                    "domain": domain,
                    "is_learning": number < learning,
                    "num_tokens": number * tokens_per_round,
                    "acceptance_length": {
                        name: lengths[name][number] for name in CONTENDERS
                    },
                }
                for number, domain in enumerate(self.domains)
            ],
            "in_domain": _ratios(lengths, in_domain),
            "other_domain": {
                "first": _ratios(lengths, slice(in_domain.stop, in_domain.stop + 1)),
                "last": _ratios(lengths, slice(-1, None)),
            },
            "num_rows": num_rows,
        }

    @staticmethod
    def show(result: Mapping[str, Any], console: Console) -> None:
        """A table of the rounds and the ratios."""
        print_vocabulary(result, console)

    @staticmethod
    def draw(result: Mapping[str, Any], path: Path) -> None:
        """Acceptance length over the tokens committed so far."""
        with replacing(path) as pending:
            draw_vocabulary(result).savefig(pending, format="png", dpi=DPI)


def _play(
    engine: EngineProcess,
    vocab_size: int,
    options: VocabularyBench,
    console: Console,
) -> list[tuple[float, Counter[int]]]:
    """Acceptance length of each round, and the tokens that were committed."""
    sizes = GridOptions(concurrencies=(options.concurrency,), output=options.output)
    prompts = cut_prompts(engine, vocab_size, sizes)
    own = {domain: cycle(prompts.own[domain]) for domain in (CODE, PROSE)}
    sampling = {"temperature": 0.0, "max_tokens": options.request_tokens}
    played = []
    for number, domain in enumerate(options.domains, 1):
        console.print(
            f"{engine.name}: round {number} of {len(options.domains)}, {domain}",
            highlight=False,
        )
        requests = [
            {"prompt": list(prompt), "sampling": sampling}
            for prompt in islice(own[domain], options.concurrency)
        ]
        found = engine.ask("generate", requests=requests)
        tokens = Counter(t for each in found["answers"] for t in each["token_ids"])
        played.append((1 + found["accepted"] / max(1, found["num_drafts"]), tokens))
    return played


def _write_list(
    model: str, learnt: Sequence[Counter[int]], num_rows: int | None, folder: Path
) -> int:
    """A list of what was committed; returns how many rows it has."""
    # Brings transformers: seconds, for this command alone.
    from vllm_mtp.tools.vocab_build import build_list, read_model

    known = read_model(model)
    counts = np.zeros(known.size, np.int64)
    for tokens in learnt:
        np.add.at(counts, list(tokens), list(tokens.values()))
    listed = build_list(counts, known, num_rows, None)
    (folder / LIST_FILE).write_text(listed.model_dump_json())
    return len(listed.token_ids)


def _ratios(lengths: Mapping[str, Sequence[float]], rounds: slice) -> dict[str, float]:
    """Of acceptance lengths in the mean of some rounds."""
    mean = {name: float(np.mean(each[rounds])) for name, each in lengths.items()}
    return {
        "auto_over_list": mean[AUTO] / mean[LISTED],
        "auto_over_full": mean[AUTO] / mean[FULL],
        "list_over_full": mean[LISTED] / mean[FULL],
    }


def draw_vocabulary(result: Mapping[str, Any]) -> Figure:
    """Acceptance length over the tokens committed so far."""
    rounds = result["rounds"]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    x = [each["num_tokens"] for each in rounds]
    labels = {
        FULL: "whole vocabulary",
        AUTO: f"auto, {result['num_rows']} rows",
        LISTED: f"list of the first texts, {result['num_rows']} rows",
    }
    for name, label in labels.items():
        y = [each["acceptance_length"][name] for each in rounds]
        axes.plot(x, y, marker="o", label=label)
    change = next(each["num_tokens"] for each in rounds if each["domain"] == PROSE)
    axes.axvline(change, color="grey", linestyle="--")
    axes.annotate(" prose", (change, 1.0), va="bottom")
    axes.set_ylim(bottom=1.0)
    axes.set_xlabel("tokens committed before the round")
    axes.set_ylabel("acceptance length")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def print_vocabulary(result: Mapping[str, Any], console: Console) -> None:
    """A table of the rounds and the ratios."""
    table = Table(title=f"Acceptance length, {result['num_rows']} rows")
    for column in ("tokens before", "domain", *CONTENDERS):
        table.add_column(column, justify="right")
    for each in result["rounds"]:
        found = (f"{each['acceptance_length'][name]:.3f}" for name in CONTENDERS)
        domain = f"{each['domain']}{' (learning)' if each['is_learning'] else ''}"
        table.add_row(str(each["num_tokens"]), domain, *found)
    console.print(table)
    ratios = {
        "after learning": result["in_domain"],
        "first round of prose": result["other_domain"]["first"],
        "last round of prose": result["other_domain"]["last"],
    }
    for when, each in ratios.items():
        console.print(
            f"{when}: auto / list {each['auto_over_list']:.3f}, "
            f"auto / full {each['auto_over_full']:.3f}",
            highlight=False,
        )
