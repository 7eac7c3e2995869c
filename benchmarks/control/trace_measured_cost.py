"""The cost of a step as a table of measured times; see `trace_cost_fit`."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from benchmarks.control.trace_world import Array, Points


class Bucket(NamedTuple):
    """Times with about as many requests."""

    num_requests: float
    # [num_points] mean draft length of a request, rising; seconds of verifying
    lengths: Array
    verify_s: Array
    slope_s: float
    """Seconds for each draft token of a request beyond the last point."""
    # [K_max + 1] seconds of drafting so deep
    draft_s: Array
    context: float
    """Tokens of context for which this holds."""

    def verify_at(self, lengths: Points) -> Points:
        """Seconds of verifying so many draft tokens of each request."""
        beyond = np.maximum(lengths - self.lengths[-1], 0) * self.slope_s
        result: Points = np.interp(lengths, self.lengths, self.verify_s) + beyond
        return result


@dataclass(frozen=True)
class MeasuredCost:
    """Times of a recording."""

    buckets: tuple[Bucket, ...]
    context_token_s: float
    catch_up_base_s: float
    catch_up_token_s: float

    def verify_s(
        self, num_requests: int, rows: Points, context: float, is_uniform: bool
    ) -> Points:
        lengths = np.asarray(rows, dtype=float) / num_requests - 1.0
        below, above, share = self._neighbours(num_requests)
        seconds: Points = (1 - share) * self._verify(below, lengths, context)
        if share:
            seconds = seconds + share * self._verify(above, lengths, context)
        return seconds

    def _verify(self, bucket: Bucket, lengths: Points, context: float) -> Points:
        more_context_s = self.context_token_s * (context - bucket.context)
        seconds = bucket.verify_at(lengths)
        # Context costs so little that it must never make a step absurdly short.
        result: Points = np.maximum(seconds + more_context_s, 0.2 * seconds)
        return result

    def draft_s(self, num_requests: int, depth: int, context: float) -> float:
        below, above, share = self._neighbours(max(num_requests, 1))
        drafting = (1 - share) * below.draft_s[depth] + share * above.draft_s[depth]
        return float(drafting)

    def catch_up_s(self, num_tokens: int) -> float:
        return self.catch_up_base_s + num_tokens * self.catch_up_token_s

    def _neighbours(self, num_requests: int) -> tuple[Bucket, Bucket, float]:
        centres = [bucket.num_requests for bucket in self.buckets]
        above = int(np.searchsorted(centres, num_requests))
        if above == 0 or above == len(centres):
            edge = self.buckets[min(above, len(centres) - 1)]
            return edge, edge, 0.0
        lower, upper = centres[above - 1], centres[above]
        share = (num_requests - lower) / (upper - lower)
        return self.buckets[above - 1], self.buckets[above], share
