"""An evaluation as tables: acceptance by position and by category, with intervals."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from vllm_mtp.tools.eval_file import EvalFile, PromptRecord

NUM_DRAWS = 2000
CONFIDENCE = 0.95


class Share(NamedTuple):
    """A figure and its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """As a percentage."""
        return f"{self.value:.1%} ({self.low:.1%} .. {self.high:.1%})"


def position_shares(records: Sequence[PromptRecord]) -> list[Share]:
    """Conditional acceptance of each position, intervals over prompts."""
    longest = max(len(record.tested) for record in records)
    padding = (0,) * longest
    tested = np.array([(*r.tested, *padding)[:longest] for r in records])
    accepted = np.array([(*r.accepted, *padding)[:longest] for r in records])
    draws = _draws(len(records))
    drawn = (draws @ accepted) / np.maximum(draws @ tested, 1)
    seen = accepted.sum(axis=0) / np.maximum(tested.sum(axis=0), 1)
    return [_share(seen[j], drawn[:, j]) for j in range(longest)]


def acceptance_length(records: Sequence[PromptRecord]) -> Share:
    """Tokens of a step that had drafts, interval over prompts."""
    drafts = np.array([record.num_drafts for record in records])
    kept = np.array([sum(record.accepted) for record in records])
    draws = _draws(len(records))
    drawn = 1 + (draws @ kept) / np.maximum(draws @ drafts, 1)
    return _share(1 + kept.sum() / max(drafts.sum(), 1), drawn)


def mean_of_prompts(records: Sequence[PromptRecord]) -> float:
    """Each prompt's acceptance length, in the mean over prompts that had drafts."""
    lengths = [1 + sum(r.accepted) / r.num_drafts for r in records if r.num_drafts]
    return float(np.mean(lengths)) if lengths else 1.0


def _draws(num_records: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.multinomial(num_records, [1 / num_records] * num_records, NUM_DRAWS)


def _share(value: float, drawn: np.ndarray) -> Share:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Share(float(value), float(low), float(high))


def print_eval(file: EvalFile, console: Console) -> None:
    """Tables and a line of totals."""
    table = Table(title=f"Acceptance of {file.model}, K = {file.draft_length}")
    table.add_column("position", justify="right")
    table.add_column("accepted if reached (95 %)")
    for number, share in enumerate(position_shares(file.records), 1):
        table.add_row(str(number), str(share))
    console.print(table)
    by_category: dict[str, list[PromptRecord]] = {}
    for record in file.records:
        by_category.setdefault(record.category or "-", []).append(record)
    if len(by_category) > 1:
        console.print(_category_table(by_category | {"all": [*file.records]}))
    length = acceptance_length(file.records)
    num_drafts = sum(record.num_drafts for record in file.records)
    num_tokens = sum(record.num_tokens for record in file.records)
    mean_k = sum(r.num_draft_tokens for r in file.records) / max(num_drafts, 1)
    speed = num_tokens / file.seconds if file.seconds else 0.0
    console.print(
        f"{len(file.records)} prompts, {num_drafts} drafts of {mean_k:.2f} tokens, "
        f"{speed:.1f} tokens/s: acceptance length {length.value:.3f} "
        f"({length.low:.3f} .. {length.high:.3f})",
        highlight=False,
    )


def _category_table(by_category: dict[str, list[PromptRecord]]) -> Table:
    table = Table(title="By category")
    for column in (
        *("category", "prompts", "acceptance length"),
        *("mean of prompts", "first position"),
    ):
        table.add_column(column)
    for name, records in by_category.items():
        length = acceptance_length(records)
        table.add_row(
            name,
            str(len(records)),
            f"{length.value:.2f} ({length.low:.2f} .. {length.high:.2f})",
            f"{mean_of_prompts(records):.2f}",
            str(position_shares(records)[0]),
        )
    return table
