"""Whether two servers gave one answer. Pure."""

from collections.abc import Mapping
from typing import Any

from benchmarks.http_fuzz.client import Answer, Choice

LOWEST_LOGPROB = -9999.0
"""What the API says for minus infinity."""

RELATIVE_TOLERANCE = 1e-3
"""Of logprobs far below zero."""

_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
_EXACT = (
    "text",
    "reasoning",
    "tool_calls",
    "token_ids",
    "text_offsets",
    "finish_reason",
    "stop_reason",
)


def differences(expected: Answer, found: Answer, tolerance: float) -> list[str]:
    """What is wrong with an answer, in words; empty if nothing."""
    if expected.status != found.status:
        return [
            f"status {found.status} instead of {expected.status}: "
            f"{found.error or expected.error}"
        ]
    if found.status != 200:
        return []
    new_faults = [fault for fault in found.faults if fault not in expected.faults]
    if found.is_cut or expected.is_cut:
        return new_faults + _cut_differences(expected, found)
    if expected.choices.keys() != found.choices.keys():
        return [f"choices {sorted(found.choices)}, not {sorted(expected.choices)}"]
    wrong = new_faults
    for index, wanted in expected.choices.items():
        prefix = f"choice {index}: " if len(expected.choices) > 1 else ""
        wrong += [
            prefix + each for each in _choice(wanted, found.choices[index], tolerance)
        ]
    return wrong + _usage(expected.usage, found.usage)


def _choice(wanted: Choice, found: Choice, tolerance: float) -> list[str]:
    wrong = [
        f"{name} {getattr(found, name)!r} instead of {getattr(wanted, name)!r}"
        for name in _EXACT
        if getattr(found, name) != getattr(wanted, name)
    ]
    wrong += _logprobs(wanted.logprobs, found.logprobs, tolerance)
    return wrong + _prompt_logprobs(
        wanted.prompt_logprobs, found.prompt_logprobs, tolerance
    )


def _cut_differences(expected: Answer, found: Answer) -> list[str]:
    """How far either client heard may differ, not what it heard."""
    wrong = []
    for index, choice in found.choices.items():
        other = expected.choices.get(index)
        for name in ("text", "reasoning"):
            mine, theirs = getattr(choice, name), getattr(other, name, "")
            if not mine.startswith(theirs) and not theirs.startswith(mine):
                wrong.append(f"{name} began with {mine!r} instead of {theirs!r}")
    return wrong


def _usage(
    wanted: Mapping[str, Any] | None, found: Mapping[str, Any] | None
) -> list[str]:
    if wanted is None or found is None:
        return [] if wanted == found else [f"usage {found} instead of {wanted}"]
    return [
        f"usage: {name} {found.get(name)} instead of {wanted.get(name)}"
        for name in _COUNTS
        if wanted.get(name) != found.get(name)
    ]


def _is_near(a: float | None, b: float | None, tolerance: float) -> bool:
    if a is None or b is None:
        return a is b
    a, b = max(a, LOWEST_LOGPROB), max(b, LOWEST_LOGPROB)
    return abs(a - b) <= tolerance + RELATIVE_TOLERANCE * abs(a)


def _logprobs(wanted: list[Any], found: list[Any], tolerance: float) -> list[str]:
    if len(wanted) != len(found):
        return [f"logprobs of {len(found)} tokens instead of {len(wanted)}"]
    for position, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        where = f"logprobs[{position}]"
        for key in ("token", "bytes"):
            if ours.get(key) != theirs.get(key):
                return [f"{where}: {key} {ours[key]!r} instead of {theirs[key]!r}"]
        if not _is_near(ours["logprob"], theirs["logprob"], tolerance):
            return [f"{where}: {ours['logprob']} instead of {theirs['logprob']}"]
        if wrong := _tops(theirs["top"], ours["top"], tolerance):
            return [f"{where}: {wrong}"]
    return []


def _tops(
    wanted: Mapping[str, float], found: Mapping[str, float], tolerance: float
) -> str:
    """Tokens at the end of the list may change places with equals."""
    if len(wanted) != len(found):
        return f"{len(found)} likeliest tokens instead of {len(wanted)}"
    last = min(wanted.values(), default=0.0)
    for token in wanted.keys() | found.keys():
        theirs, ours = wanted.get(token, last), found.get(token, last)
        if not _is_near(ours, theirs, tolerance):
            return f"{token!r} {ours} instead of {theirs}"
    return ""


def _prompt_logprobs(wanted: Any, found: Any, tolerance: float) -> list[str]:
    if not wanted or not found:
        return [] if bool(wanted) == bool(found) else ["prompt_logprobs are missing"]
    if len(wanted) != len(found):
        return [f"prompt_logprobs of {len(found)} tokens instead of {len(wanted)}"]
    for position, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        mine = {key: each["logprob"] for key, each in (ours or {}).items()}
        others = {key: each["logprob"] for key, each in (theirs or {}).items()}
        if wrong := _tops(others, mine, tolerance):
            return [f"prompt_logprobs[{position}]: {wrong}"]
    return []
