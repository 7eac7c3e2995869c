"""Makes a failing request smaller for as long as it fails. Pure but for the asking."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.http_fuzz.requests import RAW, FuzzRequest, is_determined

MAX_TRIALS = 80
_NEEDED = {"model", "prompt", "messages"}
_SAMPLING = {"temperature", "seed", "top_k", "min_p"}


def shrink(
    request: FuzzRequest, fails: Callable[[FuzzRequest], bool]
) -> tuple[FuzzRequest, int]:
    """The smallest request found that still fails.

    Returns:
        The request, and how many were tried.
    """
    num_trials, has_shrunk = 0, True
    while has_shrunk:
        has_shrunk = False
        for smaller in candidates(request):
            if num_trials == MAX_TRIALS:
                return request, num_trials
            num_trials += 1
            if fails(smaller):
                request, has_shrunk = smaller, True
                break
    return request, num_trials


def candidates(request: FuzzRequest) -> Iterator[FuzzRequest]:
    """Requests that are a little smaller, all with one right answer."""
    if request.raw_body is not None:
        return
    if request.closes_after is not None:
        yield replace(request, closes_after=None)
    if request.through != RAW:
        yield replace(request, through=RAW)
    for body in _bodies(request.body):
        if is_determined(body):
            yield replace(request, body=body)


def _bodies(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for key in body:
        if key not in _NEEDED and key != "temperature":
            rest = {k: v for k, v in body.items() if k != key}
            if key == "stream":
                rest.pop("stream_options", None)
            yield rest
    greedy = {k: v for k, v in body.items() if k not in _SAMPLING}
    if len(greedy) < len(body) - 1 or body.get("temperature"):
        yield greedy | {"temperature": 0}
    for key, value in body.items():
        if key == "model":
            continue
        for smaller in _values(key, value):
            yield {**body, key: smaller}


def _values(key: str, value: Any) -> Iterator[Any]:
    if isinstance(value, int) and key in ("max_tokens", "n", "min_tokens"):
        yield from (v for v in (value // 2, value - 1) if 1 <= v < value)
    elif isinstance(value, str) and key == "prompt" and len(value) > 1:
        yield value[len(value) // 2 :]
    elif isinstance(value, list) and key in _LISTS:
        yield from _lists(key, value)
    elif isinstance(value, dict) and key in _DICTS:
        yield from _dicts(value)


def _dicts(value: Mapping[str, Any]) -> Iterator[Any]:
    if len(value) > 1:
        yield from ({k: v for k, v in value.items() if k != gone} for gone in value)


def _lists(key: str, value: list[Any]) -> Iterator[Any]:
    if key == "prompt" and value and isinstance(value[0], list):
        yield value[0]
    if len(value) > 1:
        half = len(value) // 2
        yield value[half:]
        yield value[:half]
        if key != "prompt":
            yield from (value[:i] + value[i + 1 :] for i in range(len(value)))


_DICTS = ("logit_bias", "stream_options")
_LISTS = (
    "prompt",
    "messages",
    "stop",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "logprob_token_ids",
    "tools",
)
