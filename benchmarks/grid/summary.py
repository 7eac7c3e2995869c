"""From what was measured to the result of the grid benchmark. Pure.

Result (JSON)::

    options, definitions, is_exact, num_sessions
    engines.<contender>     max_draft_length, has_mended_sampling, peak_rss_bytes, ...
    cells[]                 name, workload, concurrency, temperature, context,
                            request_tokens, num_requests, prompt_tokens
         .contenders.<name> tokens_per_s, whole_tokens_per_s   spreads over the repeats
                            over_none, whole_over_none         paired ratios to the
                            geometric mean of both engines without speculation, but
                            for one of these: to the first; of mtp_plus the
                            geometric mean of both
                            over_twin   of a second engine: to the first
                            acceptance_length, acceptance_per_position,
                            mean_draft_length, num_preempted
                            split_ms                  verify, draft, rest of a step
                            draft_columns   tokens that drafts came from at the end
                            is_warm_up_only  a static K that was hopelessly behind there
                            (those longer than it were not measured and are not here)
         .best_static       the static K against which mtp_plus is slowest
         .plus_over_best_static, .plus_over_none      paired ratios
         .identical_texts   whether all greedy texts agree; null at T > 0
    overall.geometric_means over_none of every contender over all cells; where a static
                            K was not measured, that of the longest one that was
           .at_most         static K of whose means that is so: they are lower still
           .best_single_static, .plus_over_best_single_static
           .again_over_none    of the cells' medians: what only the machine does
           .plus_again_over_plus    likewise, of both engines with mtp_plus
           .lowest_acceptance                         cell and share of K = 1
           .metrics_share                 of a step, median over cells: counting
    targets[]               name, limit, value, is_reached, num_cells_missed,
                            num_cells_clearly_missed, worst_cell
    provenance              as of the beginning

Spreads are ``{median, quartiles, each}``.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.grid.journal import CALIBRATION, ENGINE, ROUND, Journal
from benchmarks.grid.options import PLUS, PLUS_AGAIN
from benchmarks.grid.race import (
    draft_length,
    hopeless_contenders,
    is_static,
    unmeasured_contenders,
    warm_up_rounds,
)
from benchmarks.grid.targets import judge
from benchmarks.options import AGAIN
from benchmarks.spread import Spread
from vllm_mtp.tools.engine_process import NO_SPECULATION

DEFINITIONS = {
    "tokens_per_s": "committed tokens per second of decoding: over the engine steps in "
    "which as many requests run as the cell says and each has had its first token",
    "whole_tokens_per_s": "with --whole-requests: all tokens of a round over all its "
    "time, prompts included; nothing of them is in the prefix caches but the context "
    "of long cells, of which vLLM's mtp computes the last 32 tokens anew",
    "acceptance_length": "committed tokens for each verification of a request",
    "acceptance_per_position": "accepted over drafted tokens, by position in the draft",
    "mean_draft_length": "draft tokens for each verification of a request",
    "split_ms": "of a decode step, in an untimed round whose methods are wrapped with "
    "timers: target pass with head and sampling, drafting, everything else",
    "sampling": "vLLM's CPU kernel for speculative sampling at T > 0 is faulty; where "
    "has_mended_sampling is true that engine ran with the mend of "
    "integration/cpu/workarounds.py, vLLM's own mtp included",
    "best_static": "chosen after the fact, for each cell, among the measured K",
}

Record = Mapping[str, Any]

TWINS = {AGAIN: NO_SPECULATION, PLUS_AGAIN: PLUS}
"""Engines that do the same as others."""


class Clock(NamedTuple):
    """Which figures of a round make its speed."""

    tokens: str
    seconds: str


FULL = Clock("full_tokens", "full_seconds")
WHOLE = Clock("num_tokens", "seconds")


def summarise(journal: Journal) -> dict[str, Any]:
    """The result of all cells that have a repeat of every contender.

    Raises:
        ConfigError: Nothing has been measured.
    """
    header = journal.header
    names = dict.fromkeys(record["cell"] for record in journal.of_kind(ROUND))
    cells = [cell for name in names if (cell := summarise_cell(journal, name))]
    engines = {
        record["contender"]: {
            key: value
            for key, value in record.items()
            if key not in ("kind", "contender")
        }
        for record in journal.of_kind(ENGINE)
    }
    overall = summarise_overall(cells)
    return {
        "options": header["options"],
        "definitions": DEFINITIONS,
        "is_exact": header["options"]["dtype"] == "float32",
        "num_sessions": sum(
            record["contender"] == NO_SPECULATION for record in journal.of_kind(ENGINE)
        ),
        "engines": engines,
        "cells": cells,
        "overall": overall,
        "targets": judge(cells, overall),
        "provenance": {**header["provenance"], "code_sha256": header["code_sha256"]},
    }


def summarise_cell(journal: Journal, name: str) -> dict[str, Any]:
    """One cell; empty while it has no whole repeat."""
    repeats = list(whole_repeats(journal, name).values())
    if not repeats:
        return {}
    calibration = next(r for r in journal.of_kind(CALIBRATION) if r["cell"] == name)
    warm_ups = warm_up_rounds(journal, name)
    hopeless = hopeless_contenders(journal, name)
    unmeasured = unmeasured_contenders(journal, name)
    counts_prompts = journal.header["options"].get("whole_requests", False)
    contenders = {
        contender: _summarise_contender(
            [warm_ups] if contender in hopeless else repeats,
            contender,
            warm_ups.get(contender),
        )
        | {"is_warm_up_only": contender in hopeless}
        | (_whole_rounds(repeats, contender) if counts_prompts else {})
        for contender in _contenders(journal)
        if contender not in unmeasured
    }
    over_static = plus_over_static(journal, name)
    best = min(over_static, key=lambda contender: over_static[contender])
    return {
        "name": name,
        **calibration["axes"],
        **{
            key: calibration[key]
            for key in ("request_tokens", "num_requests", "prompt_tokens")
        },
        "contenders": contenders,
        "best_static": best,
        "plus_over_best_static": _ratio(repeats, PLUS, best, FULL),
        "plus_over_none": _ratio_to_none(repeats, PLUS, FULL),
        "identical_texts": None
        if calibration["axes"]["temperature"]
        else _texts_agree(repeats),
    }


def _summarise_contender(
    repeats: Sequence[Mapping[str, Record]], name: str, warm_up: Record | None
) -> dict[str, Any]:
    return {
        "tokens_per_s": _speeds(repeats, name, FULL).as_json(),
        "over_none": _ratio_to_none(repeats, name, FULL),
        **_over_twin(repeats, name),
        **_acceptance(_rounds_of(repeats, name)),
        "split_ms": _split_ms(warm_up),
        "draft_columns": _rounds_of(repeats, name)[-1].get("draft_columns"),
    }


def _whole_rounds(repeats: Sequence[Mapping[str, Record]], name: str) -> dict[str, Any]:
    """Empty where it played in none of the repeats."""
    if not _rounds_of(repeats, name):
        return {}
    return {
        "whole_tokens_per_s": _speeds(repeats, name, WHOLE).as_json(),
        "whole_over_none": _ratio_to_none(repeats, name, WHOLE),
    }


def plus_over_static(journal: Journal, name: str) -> dict[str, float]:
    """Medians of `mtp_plus` over each static K that was measured in a cell's repeats.

    Paired, because not every K plays in every repeat, and the machine drifts.
    """
    repeats = list(whole_repeats(journal, name).values())
    measured = {c: None for repeat in repeats for c in repeat if is_static(c)}
    return {
        contender: _ratio(repeats, PLUS, contender, FULL)["median"]
        for contender in measured
    }


def summarise_overall(cells: Sequence[Record]) -> dict[str, Any]:
    """Geometric means over the grid and who is best with one K for all of it."""
    if not cells:
        return {}
    names = list(dict.fromkeys(name for cell in cells for name in cell["contenders"]))
    means = {
        name: statistics.geometric_mean(over_none(cell, name) for cell in cells)
        for name in names
    }
    best = max(filter(is_static, means), key=lambda name: means[name])
    return {
        "geometric_means": means,
        "at_most": [
            name
            for name in names
            if any(name not in cell["contenders"] for cell in cells)
        ],
        "best_single_static": best,
        "plus_over_best_single_static": means[PLUS] / means[best],
        "again_over_none": _twins_differ(cells, AGAIN),
        "plus_again_over_plus": _twins_differ(cells, PLUS_AGAIN),
        "lowest_acceptance": _lowest_acceptance(cells),
        "metrics_share": _metrics_share(cells),
    }


def over_none(cell: Record, name: str) -> float:
    """Median of a contender; of the longest static K measured, if it was not."""
    contenders = cell["contenders"]
    if name not in contenders:
        name = max(filter(is_static, contenders), key=draft_length)
    return float(contenders[name]["over_none"]["median"])


def whole_repeats(journal: Journal, name: str) -> dict[int, dict[str, Record]]:
    """Repeats of a cell of which everything was written: the last contender's, too.

    If a contender was measured twice, the later record counts.
    """
    by_repeat: dict[int, dict[str, Record]] = {}
    contenders = _contenders(journal)
    for record in journal.of_kind(ROUND):
        if record["cell"] == name:
            by_repeat.setdefault(record["repeat"], {})[record["contender"]] = record
    return {
        repeat: {each: rounds[each] for each in contenders if each in rounds}
        for repeat, rounds in sorted(by_repeat.items())
        if PLUS in rounds
    }


def _contenders(journal: Journal) -> list[str]:
    """All names, in the order in which the engines were started."""
    return list(dict.fromkeys(e["contender"] for e in journal.of_kind(ENGINE)))


def _rounds_of(repeats: Iterable[Mapping[str, Record]], name: str) -> list[Record]:
    return [repeat[name] for repeat in repeats if name in repeat]


def _speeds(
    repeats: Iterable[Mapping[str, Record]], contender: str, clock: Clock
) -> Spread:
    """One for each repeat; of `mtp_plus` the geometric mean of both engines."""
    played = [repeat for repeat in repeats if contender in repeat]
    own = _own_speeds(played, contender, clock)
    if contender != PLUS or not all(PLUS_AGAIN in repeat for repeat in played):
        return own
    return Spread.of_geometric_mean(own, _own_speeds(played, PLUS_AGAIN, clock))


def _own_speeds(
    repeats: Iterable[Mapping[str, Record]], contender: str, clock: Clock
) -> Spread:
    rounds = [repeat[contender] for repeat in repeats]
    return Spread.of([each[clock.tokens] / each[clock.seconds] for each in rounds])


def _ratio(
    repeats: Iterable[Mapping[str, Record]], over: str, under: str, clock: Clock
) -> dict[str, Any]:
    """Paired within the repeats that both were in."""
    both = [repeat for repeat in repeats if over in repeat and under in repeat]
    speeds = (_speeds(both, name, clock) for name in (over, under))
    return Spread.of_ratio(*speeds).as_json()


def _ratio_to_none(
    repeats: Sequence[Mapping[str, Record]], name: str, clock: Clock
) -> dict[str, Any]:
    """Two engines without speculation are a steadier measure than one of them."""
    if name in (NO_SPECULATION, AGAIN):
        return _ratio(repeats, name, NO_SPECULATION, clock)
    both = [each for each in repeats if name in each and NO_SPECULATION in each]
    measures = [
        each
        for each in (NO_SPECULATION, AGAIN)
        if all(each in rounds for rounds in both)
    ]
    mean = Spread.of_geometric_mean(*(_speeds(both, m, clock) for m in measures))
    return Spread.of_ratio(_speeds(both, name, clock), mean).as_json()


def _over_twin(
    repeats: Sequence[Mapping[str, Record]], name: str
) -> dict[str, dict[str, Any]]:
    """Of a contender that there is to see what two engines that do the same differ."""
    if name not in TWINS:
        return {}
    both = [each for each in repeats if name in each and TWINS[name] in each]
    speeds = (_own_speeds(both, each, FULL) for each in (name, TWINS[name]))
    return {"over_twin": Spread.of_ratio(*speeds).as_json()}


def _acceptance(rounds: Sequence[Record]) -> dict[str, Any]:
    drafted = sums_by_position(each["drafted_per_position"] for each in rounds)
    accepted = sums_by_position(each["accepted_per_position"] for each in rounds)
    decode_steps = sum(each["decode_request_steps"] for each in rounds)
    # Journals from before all steps were counted have only those.
    all_steps = sum(
        each.get("request_steps", each["decode_request_steps"]) for each in rounds
    )
    tokens = sum(each["decode_tokens"] for each in rounds)
    return {
        "acceptance_length": tokens / decode_steps,
        "acceptance_per_position": [
            a / d if d else None for a, d in zip(accepted, drafted, strict=True)
        ],
        "mean_draft_length": sum(drafted) / all_steps,
        "num_preempted": sum(each["num_preempted"] for each in rounds),
    }


def sums_by_position(lists: Iterable[Sequence[int]]) -> list[int]:
    """Position by position; an engine that never drafted has none."""
    sums: list[int] = []
    for values in lists:
        sums.extend([0] * (len(values) - len(sums)))
        for position, value in enumerate(values):
            sums[position] += value
    return sums


def _split_ms(warm_up: Record | None) -> dict[str, float] | None:
    if warm_up is None or not warm_up["decode_split_seconds"]:
        return None
    steps = warm_up["decode_steps"]
    parts = {
        part: 1e3 * seconds / steps
        for part, seconds in warm_up["decode_split_seconds"].items()
    }
    step_ms = 1e3 * warm_up["decode_seconds"] / steps
    return {**parts, "rest": step_ms - sum(parts.values())}


def _twins_differ(cells: Sequence[Record], twin: str) -> dict[str, Any] | None:
    """How much two engines that do the same differ; None if there was only one."""
    if twin not in cells[0]["contenders"]:
        return None
    medians = [cell["contenders"][twin]["over_twin"]["median"] for cell in cells]
    return Spread.of(medians).as_json()


def _metrics_share(cells: Sequence[Record]) -> float | None:
    """Median share of a step that `mtp_plus` spends counting for its metrics."""
    splits = [cell["contenders"][PLUS]["split_ms"] for cell in cells]
    shares = [s["metrics"] / sum(s.values()) for s in splits if s and "metrics" in s]
    return statistics.median(shares) if shares else None


def _texts_agree(repeats: Sequence[Mapping[str, Record]]) -> bool:
    return all(
        len({each["texts_sha256"] for each in repeat.values()}) == 1
        for repeat in repeats
    )


def _lowest_acceptance(cells: Sequence[Record]) -> dict[str, Any] | None:
    """The cell in which the first draft token is accepted least often."""
    static = list(filter(is_static, cells[0]["contenders"]))
    shares = [
        {"cell": cell["name"], "accepted": positions[0]}
        for cell in cells
        if (positions := cell["contenders"][static[0]]["acceptance_per_position"])
    ]
    return min(shares, key=lambda each: each["accepted"], default=None)
