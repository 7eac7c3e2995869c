"""Reads traces: what `TracingController` wrote, checked and as records again."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vllm_mtp.config import MAX_DRAFT_LENGTH, ConfigError
from vllm_mtp.integration.observe.tracing import (
    OUTCOME_FIELDS,
    TRACE_FORMAT,
    TRACE_VERSION,
)
from vllm_mtp.records import (
    DecodeRequest,
    DraftDecision,
    RequestOutcome,
    StepOutcome,
)


class TracedDecision(NamedTuple):
    """What a controller was shown and what it chose."""

    requests: tuple[DecodeRequest, ...]
    decision: DraftDecision
    survival: Mapping[str, tuple[float, ...]]
    """The controller's estimate of ``S_1`` .. ``S_K_max`` by request id; empty where
    it has none."""


class TracedOutcome(NamedTuple):
    """What came of a step."""

    outcome: StepOutcome
    num_decisions_before: int
    """Decisions that the trace holds before it; the last of them belongs to the same
    step, or to a later one under async scheduling."""


@dataclass(frozen=True)
class Trace:
    """A whole trace. Request ids are running numbers, as text."""

    path: Path
    max_draft_length: int
    provenance: Mapping[str, Any]
    decisions: tuple[TracedDecision, ...]
    outcomes: tuple[TracedOutcome, ...]
    is_cut_off: bool
    """The last line was incomplete (a killed server) and is left out."""


_NOT_A_LINE = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
)


def read_trace(path: Path) -> Trace:
    """Read and check a trace.

    Raises:
        ConfigError: The file cannot be read or is no trace; names file and line.
    """
    lines, is_cut_off = _lines(path)
    header = _header(path, lines[0] if lines else "")
    bound = header["max_draft_length"]
    decisions: list[TracedDecision] = []
    outcomes: list[TracedOutcome] = []
    for number, text in enumerate(lines[1:], start=2):
        try:
            line = json.loads(text)
            if "decision" in line:
                decisions.append(_decision(line, bound))
            else:
                outcomes.append(TracedOutcome(_outcome(line, bound), len(decisions)))
        except _NOT_A_LINE as error:
            raise ConfigError(
                f"trace {str(path)!r}: line {number} is neither a decision nor an "
                f"outcome ({type(error).__name__}: {error})."
            ) from None
    return Trace(
        path,
        bound,
        header["provenance"],
        tuple(decisions),
        tuple(outcomes),
        is_cut_off,
    )


def _lines(path: Path) -> tuple[list[str], bool]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"trace {str(path)!r} is no text file.") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"trace {str(path)!r} cannot be read: {reason}.") from None
    lines = text.splitlines()
    is_cut_off = bool(lines) and not text.endswith("\n")
    return (lines[:-1] if is_cut_off else lines), is_cut_off


def _header(path: Path, text: str) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != TRACE_FORMAT:
        raise ConfigError(
            f"trace {str(path)!r} is no trace: the first line must be the header that "
            "speculative_config.trace_path writes."
        )
    if header.get("version") != TRACE_VERSION:
        raise ConfigError(
            f"trace {str(path)!r} has version {header.get('version')!r}; this release "
            f"reads version {TRACE_VERSION}."
        )
    bound, provenance = header.get("max_draft_length"), header.get("provenance")
    if type(bound) is not int or not 1 <= bound <= MAX_DRAFT_LENGTH:
        raise ConfigError(
            f"trace {str(path)!r}: max_draft_length={bound!r} in the header; must be "
            f"an integer from 1 to {MAX_DRAFT_LENGTH}."
        )
    if not isinstance(provenance, dict):
        raise ConfigError(f"trace {str(path)!r}: the header has no provenance.")
    return header


def _decision(line: dict[str, Any], bound: int) -> TracedDecision:
    estimates = [
        tuple(_probability(value) for value in values) for values in line["survival"]
    ]
    requests, lengths = [], {}
    survival: dict[str, tuple[float, ...]] = {}
    for row in line["requests"]:
        # Whether they are constrained is not in the first traces.
        number, context, is_greedy, pin, length, index, *kind = row
        request_id = str(_count(number))
        pinned = None if pin is None else _count(pin)
        requests.append(
            DecodeRequest(
                request_id,
                _count(context),
                bool(is_greedy),
                pinned,
                is_constrained=bool(kind and kind[0]),
            )
        )
        lengths[request_id] = _count(length, bound)
        if index is not None:
            survival[request_id] = estimates[_count(index)]
    depth = _count(line["depth"], bound)
    decision = DraftDecision(depth, lengths, str(line["reason"]))
    return TracedDecision(tuple(requests), decision, survival)


def _outcome(line: dict[str, Any], bound: int) -> StepOutcome:
    seconds = line["step_time_s"]
    if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise ValueError(f"step_time_s is {seconds!r}")
    counts = {name: _count(line[name]) for name in OUTCOME_FIELDS}
    return StepOutcome(
        requests=tuple(_request_outcomes(line["requests"], bound)),
        step_time_s=float(seconds),
        # These are not in the first traces.
        is_greedy=bool(line.get("is_greedy", True)),
        shadow_drafts=tuple(_request_outcomes(line.get("shadow_drafts", ()), bound)),
        copies=(),  # nothing is copied while a trace is written
        copied_drafts=(),
        **counts,
    )


def _request_outcomes(
    rows: Iterable[tuple[int, int, int]], bound: int
) -> Iterable[RequestOutcome]:
    for number, drafted, accepted in rows:
        drafted = _count(drafted, bound)
        yield RequestOutcome(str(_count(number)), drafted, _count(accepted, drafted))


def _count(value: Any, limit: float = math.inf) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise ValueError(f"{value!r} is no count up to {limit}")
    return value


def _probability(value: Any) -> float:
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{value!r} is no probability")
    return float(value)
