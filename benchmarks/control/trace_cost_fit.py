"""The cost of a step, estimated from the times of a recording.

Assumptions, each of which a real engine breaks a little:

- a step's time is that of verifying, a function of requests and rows, plus that of
  drafting, a function of requests and depth, plus so much for each token of context.
  Both functions are tables of medians (found by median polish, so that outliers and
  unequal numbers of measurements do no harm) and may rise and fall; between their
  points they are linear, above the most rows that were seen for so many requests they
  go on with the slope of the upper half, which is not allowed to be negative;
- equal and unequal draft lengths cost the same (not so with full CUDA graphs);
- steps with prefill, and those in which the MTP layers catch up, say nothing about
  either; what they take longer is theirs;
- what is left is noise, which multiplies.

Drafting and verifying can be told apart only where depth and rows vary independently,
as they do under the ``random`` controller.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from benchmarks.control.trace_measured_cost import Bucket, MeasuredCost
from benchmarks.control.trace_world import Array
from vllm_mtp.config import ConfigError
from vllm_mtp.records import StepOutcome

MIN_BUCKET_STEPS = 40
"""Fewer steps with about as many requests are counted with their neighbours."""
MIN_POINT_STEPS = 16
"""Steps behind a point of the table of verification times."""
MIN_DEPTH_STEPS = 4
_POLISH_ROUNDS = 30


class Fitted(NamedTuple):
    """A cost curve and what it leaves unexplained."""

    cost: MeasuredCost
    prefill_token_s: float
    # [num_steps] time over what the curve says, of the steps that only decoded
    noise: Array


def fit_cost(outcomes: Sequence[StepOutcome], max_draft_length: int) -> Fitted:
    """Estimate what steps cost.

    Raises:
        ConfigError: Too few steps that only decode, or all equally deep.
    """
    plain = _Steps(
        [
            outcome
            for outcome in outcomes
            if _is_decode(outcome)
            and not outcome.num_prefill_tokens
            and not outcome.num_backfill_tokens
        ]
    )
    if len(plain.seconds) < MIN_BUCKET_STEPS:
        raise ConfigError(
            f"the trace has {len(plain.seconds)} steps that only decode; at least "
            f"{MIN_BUCKET_STEPS} are needed to estimate what steps cost."
        )
    if len(np.unique(plain.depths)) < 2:
        raise ConfigError(
            f"all steps of the trace draft {plain.depths[0]} deep, which says nothing "
            'about the cost of other depths: record with "controller": "random".'
        )
    masks = _bucket_masks(plain.num_requests)
    whole = _depth_times(plain, np.ones(len(plain.seconds), dtype=bool))
    buckets = [_fit_bucket(plain, mask, max_draft_length, whole) for mask in masks]
    cost = MeasuredCost(tuple(buckets), 0.0, 0.0, 0.0)
    cost = _with_context(cost, plain)
    cost, prefill_token_s = _with_rest(cost, outcomes)
    return Fitted(cost, prefill_token_s, plain.seconds / plain.fitted(cost))


class _Steps:
    """Outcomes, column by column."""

    def __init__(self, outcomes: Sequence[StepOutcome]) -> None:
        self.seconds = np.array([o.step_time_s for o in outcomes])
        self.num_requests = np.array([o.num_decode_requests for o in outcomes])
        rows = np.array(
            [o.num_scheduled_tokens - o.num_prefill_tokens for o in outcomes]
        )
        self.lengths = rows / np.maximum(self.num_requests, 1) - 1.0
        self.depths = np.array([o.draft_depth for o in outcomes], dtype=int)
        self.contexts = np.array([o.num_context_tokens for o in outcomes], dtype=float)

    def fitted(self, cost: MeasuredCost) -> Array:
        """What a curve says about each step."""
        found = []
        columns = (self.num_requests, self.lengths, self.depths, self.contexts)
        for requests, length, depth, context in zip(*columns, strict=True):
            rows = np.array([requests * (1 + length)])
            verify_s = cost.verify_s(requests, rows, context, False)[0]
            found.append(verify_s + cost.draft_s(requests, depth, context))
        return np.array(found)


def _is_decode(outcome: StepOutcome) -> bool:
    return outcome.num_decode_requests > 0 and outcome.step_time_s > 0


def _bucket_masks(num_requests: Array) -> list[Array]:
    """Steps with about as many requests: half octaves, small ones joined upwards."""
    keys = np.round(2 * np.log2(num_requests)).astype(int)
    masks: list[Array] = []
    pending = np.zeros(len(keys), dtype=bool)
    for key in np.unique(keys):
        pending = pending | (keys == key)
        if pending.sum() >= MIN_BUCKET_STEPS:
            masks.append(pending)
            pending = np.zeros(len(keys), dtype=bool)
    if pending.any():
        masks[-1] = masks[-1] | pending
    return masks


def _points(lengths: Array) -> Array:
    """Index of each step's point: neighbours in length, no drafts apart."""
    order = np.argsort(lengths, kind="stable")
    wanted = max(MIN_POINT_STEPS, len(lengths) // 40)
    index = np.zeros(len(lengths), dtype=int)
    current, size = 0, 0
    for before, here in pairwise(order):
        size += 1
        is_next = lengths[here] > lengths[before] + 1e-9
        leaves_zero = is_next and lengths[before] == 0.0
        if leaves_zero or (is_next and size >= wanted):
            current, size = current + 1, 0
        index[here] = current
    return index


def _polish(seconds: Array, points: Array, depths: Array) -> tuple[Array, Array]:
    """Medians by point and by depth that add up to the times."""
    verify = np.zeros(points.max() + 1)
    draft = np.zeros(depths.max() + 1)
    at_point = [points == point for point in range(len(verify))]
    at_depth = {depth: depths == depth for depth in np.unique(depths)}
    for _ in range(_POLISH_ROUNDS):
        left = seconds - draft[depths]
        verify = np.array([np.median(left[mask]) for mask in at_point])
        left = seconds - verify[points]
        for depth, mask in at_depth.items():
            draft[depth] = np.median(left[mask])
    return verify, draft


def _depth_times(steps: _Steps, mask: Array) -> dict[int, float]:
    """Seconds of drafting by depth, up to a constant; depths seen too seldom left
    out."""
    points = _points(steps.lengths[mask])
    _, draft = _polish(steps.seconds[mask], points, steps.depths[mask])
    depths, counts = np.unique(steps.depths[mask], return_counts=True)
    seen = [d for d, n in zip(depths, counts, strict=True) if n >= MIN_DEPTH_STEPS]
    return {int(depth): float(draft[depth]) for depth in seen}


def _fit_bucket(
    steps: _Steps, mask: Array, max_draft_length: int, whole: dict[int, float]
) -> Bucket:
    times = _depth_times(steps, mask)
    if len(times) < 2:  # seen at one depth only: as in the whole run
        times = whole
    draft_s = _from_zero(times, max_draft_length)
    points = _points(steps.lengths[mask])
    left = steps.seconds[mask] - draft_s[steps.depths[mask]]
    indices = range(points.max() + 1)
    lengths = np.array([steps.lengths[mask][points == i].mean() for i in indices])
    verify_s = np.array([np.median(left[points == i]) for i in indices])
    return Bucket(
        float(np.median(steps.num_requests[mask])),
        lengths,
        verify_s,
        _slope(lengths[len(lengths) // 2 :], verify_s[len(lengths) // 2 :]),
        draft_s,
        float(np.median(steps.contexts[mask])),
    )


def _slope(x: Array, y: Array) -> float:
    """Least squares; never negative, 0 through a single point."""
    return max(float(np.polyfit(x, y, 1)[0]), 0.0) if len(x) > 1 else 0.0


def _from_zero(times: dict[int, float], max_draft_length: int) -> Array:
    """Seconds of each depth, 0 at depth 0; a line through the others where unseen."""
    depths, seconds = list(times), list(times.values())
    line = np.polyfit(depths, seconds, 1) if len(depths) > 1 else np.array([0.0, 0.0])
    every = np.arange(max_draft_length + 1)
    table = np.interp(every, depths, seconds)
    outside = (every < depths[0]) | (every > depths[-1])
    table[outside] = np.polyval(line, every[outside])
    result: Array = np.maximum(table - table[0], 0.0)
    return result


def _with_context(cost: MeasuredCost, steps: _Steps) -> MeasuredCost:
    """Adds the cost of context: the slope of what is left, outliers cut off."""
    centres = np.array([bucket.num_requests for bucket in cost.buckets])
    nearest = np.abs(steps.num_requests[:, None] - centres).argmin(axis=1)
    references = np.array([bucket.context for bucket in cost.buckets])
    slope = _trimmed_slope(
        steps.contexts - references[nearest], steps.seconds - steps.fitted(cost)
    )
    return MeasuredCost(cost.buckets, slope, 0.0, 0.0)


def _with_rest(
    cost: MeasuredCost, outcomes: Sequence[StepOutcome]
) -> tuple[MeasuredCost, float]:
    """Adds the catch-up pass; returns seconds of a token in prefill, too."""
    resumed = [
        o
        for o in outcomes
        if _is_decode(o) and o.num_backfill_tokens and not o.num_prefill_tokens
    ]
    base_s = token_s = 0.0
    if len(resumed) >= MIN_POINT_STEPS:
        steps = _Steps(resumed)
        extra_s = steps.seconds - steps.fitted(cost)
        tokens = np.array([float(o.num_backfill_tokens) for o in resumed])
        token_s = _trimmed_slope(tokens, extra_s)
        base_s = max(float(np.median(extra_s - token_s * tokens)), 0.0)
    filled = [o for o in outcomes if o.num_prefill_tokens and _is_decode(o)]
    prefill_token_s = 0.0
    if filled:
        steps = _Steps(filled)
        tokens = np.array([float(o.num_prefill_tokens) for o in filled])
        extra_s = (steps.seconds - steps.fitted(cost)) / tokens
        prefill_token_s = max(float(np.median(extra_s)), 0.0)
    rest = MeasuredCost(cost.buckets, cost.context_token_s, base_s, token_s)
    return rest, prefill_token_s


def _trimmed_slope(x: Array, y: Array) -> float:
    """Least squares without the outliers; never negative."""
    deviation = np.abs(y - np.median(y))
    kept = deviation <= 4 * np.median(deviation) + 1e-12
    if kept.sum() < MIN_POINT_STEPS or np.ptp(x[kept]) == 0:
        return 0.0
    return _slope(x[kept], y[kept])
