"""Evaluations of one model, side by side, for a page."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from pydantic import ValidationError

from vllm_mtp.config import ConfigError
from vllm_mtp.tools.compare import CompareOptions, Comparison, compare
from vllm_mtp.tools.compare_report import print_comparison, verdict
from vllm_mtp.tools.eval_file import EvalFile, PromptRecord
from vllm_mtp.tools.eval_report import Share, acceptance_length, position_shares
from vllm_mtp.tools.report_page import Body, Cell, PageTable, Picture, Remark
from vllm_mtp.tools.report_plots import Series, draw_categories, draw_positions
from vllm_mtp.tools.report_source import Source, damaged
from vllm_mtp.tools.report_tables import printed

NOTHING = Cell("-")
UNSORTED = "-"


class Evaluation(NamedTuple):
    """A file and its short name."""

    name: str
    file: EvalFile


def render_eval(sources: Sequence[Source]) -> Body:
    """Acceptance by position and by category, a column for each evaluation.

    Two and more of the same prompts and settings are also compared with the first one.

    Raises:
        DamagedError: A file contradicts itself.
    """
    found = [_read(each) for each in sources]
    categories = _categories(found)
    pictures = [
        Picture(
            "Share of draft tokens that were accepted, of those whose predecessors "
            "were, by position; bars: 95 % intervals over prompts.",
            lambda: draw_positions([_by_position(each) for each in found]),
        )
    ]
    tables = [_settings_table(found), _position_table(found)]
    if len(categories) > 1:
        pictures.append(
            Picture(
                "Tokens that one step brings, by category of prompt; bars: 95 % "
                "intervals over prompts.",
                lambda: draw_categories(
                    categories, [_by_category(each, categories) for each in found]
                ),
            )
        )
        tables.append(_category_table(found, categories))
    compared = [_compare(found[0], each) for each in found[1:]]
    for each in compared:
        tables += each.tables
    sentences = [*map(_sentence, found), *(each.sentence for each in compared)]
    failed = any(each.is_failure for each in compared)
    passed = bool(compared) and all(each.is_failure is False for each in compared)
    return Body(
        "\n".join(filter(None, sentences)),
        "bad" if failed else "good" if passed else "",
        pictures,
        tables,
        [remark for each in compared for remark in each.remarks],
    )


def _read(source: Source) -> Evaluation:
    try:
        return Evaluation(source.name, EvalFile.model_validate(source.content))
    except ValidationError as error:
        raise damaged([source], error) from None


class Compared(NamedTuple):
    """One evaluation against the first."""

    sentence: str
    is_failure: bool | None
    """None where the two cannot be compared."""
    tables: Sequence[PageTable] = ()
    remarks: Sequence[Remark] = ()


def _compare(base: Evaluation, new: Evaluation) -> Compared:
    try:
        comparison = compare(base.file, new.file, CompareOptions())
    except ConfigError as error:
        remark = f"{base.name} and {new.name} cannot be compared: {error}"
        return Compared("", None, remarks=[Remark(f"{remark}.")])
    return Compared(
        f"{new.name} against {base.name}: {verdict(comparison)}",
        comparison.is_failure,
        [_compared_table(comparison, base.name, new.name)],
    )


def _compared_table(comparison: Comparison, base: str, new: str) -> PageTable:
    (table,) = printed(lambda console: print_comparison(comparison, console)).tables
    rate = comparison.options.false_alarm_rate
    return replace(
        table,
        caption=f"{new} against {base}",
        note=f"Paired by prompt; all intervals together miss the truth on the bad side "
        f"at most {rate:.1%} of the time.",
    )


def _sentence(found: Evaluation) -> str:
    length = _length_of(found.file.records)
    (first, *_) = [*_by_position(found).shares, None]
    if length is None or first is None:
        return f"{found.name}: there was no draft."
    return (
        f"{found.name}: with K = {found.file.draft_length} a step brings "
        f"{length.value:.2f} tokens ({length.low:.2f} to {length.high:.2f}), and keeps "
        f"{first.value:.1%} of first draft tokens."
    )


def _by_position(found: Evaluation) -> Series:
    records = found.file.records
    tested = [0] * found.file.num_positions
    for record in records:
        for position, count in enumerate(record.tested):
            tested[position] += count
    shares = position_shares(records) if tested else []
    known = (s if t else None for s, t in zip(shares, tested, strict=True))
    return Series(found.name, list(known))


def _by_category(found: Evaluation, categories: Sequence[str]) -> Series:
    lengths = [_length_of(_records_of(found, name)) for name in categories]
    return Series(found.name, lengths)


def _length_of(records: Sequence[PromptRecord]) -> Share | None:
    if not sum(record.num_drafts for record in records):
        return None
    return acceptance_length(records)


def _categories(found: Sequence[Evaluation]) -> list[str]:
    """Of all evaluations, in the order in which they first come."""
    names = (r.category or UNSORTED for each in found for r in each.file.records)
    return list(dict.fromkeys(names))


def _records_of(found: Evaluation, category: str) -> list[PromptRecord]:
    return [r for r in found.file.records if (r.category or UNSORTED) == category]


def _settings_table(found: Sequence[Evaluation]) -> PageTable:
    headers = (
        "evaluation", "K", "T", "prompts", "drafts", "mean K", "tokens", "tokens/s",
        "acceptance length (95 %)",
    )  # fmt: skip
    prompts = [each.file.prompts_sha256 for each in found]
    same = all(a == b for a, b in pairwise(prompts))
    note = "" if same else "The evaluations are of different prompts."
    rows = tuple(_settings_row(each) for each in found)
    numeric = frozenset(range(1, len(headers)))
    return PageTable("What was evaluated", headers, rows, numeric, note)


def _settings_row(found: Evaluation) -> tuple[Cell, ...]:
    file = found.file
    num_drafts = sum(record.num_drafts for record in file.records)
    num_tokens = sum(record.num_tokens for record in file.records)
    mean_k = sum(r.num_draft_tokens for r in file.records) / max(num_drafts, 1)
    speed = f"{num_tokens / file.seconds:.1f}" if file.seconds else "-"
    length = _length_of(file.records)
    texts = (
        found.name,
        str(file.draft_length),
        f"{file.temperature:g}",
        f"{len(file.records):,}",
        f"{num_drafts:,}",
        f"{mean_k:.2f}",
        f"{num_tokens:,}",
        speed,
        _interval(length).text,
    )
    return tuple(map(Cell, texts))


def _interval(share: Share | None) -> Cell:
    if share is None:
        return NOTHING
    return Cell(f"{share.value:.3f} ({share.low:.3f} .. {share.high:.3f})")


def _position_table(found: Sequence[Evaluation]) -> PageTable:
    columns = [_by_position(each).shares for each in found]
    rows = [
        (Cell(str(position + 1)), *(_share_at(shares, position) for shares in columns))
        for position in range(max(map(len, columns)))
    ]
    return PageTable(
        "Accepted if reached, by position (95 %)",
        ("position", *(each.name for each in found)),
        tuple(rows),
        frozenset(range(1, 1 + len(found))),
    )


def _share_at(shares: Sequence[Share | None], position: int) -> Cell:
    share = shares[position] if position < len(shares) else None
    return NOTHING if share is None else Cell(str(share))


def _category_table(
    found: Sequence[Evaluation], categories: Sequence[str]
) -> PageTable:
    rows = []
    for name in categories:
        records = [_records_of(each, name) for each in found]
        counts = dict.fromkeys(str(len(each)) for each in records)
        lengths = (_interval(_length_of(each)) for each in records)
        rows.append((Cell(name), Cell(" / ".join(counts)), *lengths))
    headers = ("category", "prompts", *(each.name for each in found))
    numeric = frozenset(range(1, len(headers)))
    caption = "Acceptance length by category (95 %)"
    return PageTable(caption, headers, tuple(rows), numeric)
