"""Batches whose steps take about the same."""

from bisect import bisect_right
from functools import cache
from typing import NamedTuple

_MAX_REQUESTS = 4096
_CONTEXT_BOUNDS = (1024, 4096, 16384, 65536)


class BatchKind(NamedTuple):
    """Batches whose steps are believed to take the same."""

    num_requests: int
    """Bound of a bucket."""
    context_bucket: int
    is_greedy: bool
    """None is sampled."""


@cache
def request_bucket(num_requests: int) -> int:
    """Smallest bucket bound >= ``num_requests``: 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    if num_requests <= 4:
        return max(num_requests, 1)
    bound = 4
    while 2 * bound < min(num_requests, _MAX_REQUESTS):
        bound *= 2
    return 3 * bound // 2 if num_requests <= 3 * bound // 2 else 2 * bound


def context_bucket(tokens_per_request: float) -> int:
    """Index of the bucket of a mean context length."""
    return bisect_right(_CONTEXT_BOUNDS, tokens_per_request)


def kind_of(num_requests: int, context: float, is_greedy: bool) -> BatchKind:
    """Of ``num_requests`` that have ``context`` tokens each, in the mean."""
    return BatchKind(request_bucket(num_requests), context_bucket(context), is_greedy)
