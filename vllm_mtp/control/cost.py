"""What a step costs: Bayesian regression of the logarithm of step times.

A batch decides the *block*: a bucket of the number of decoding requests, and whether
any of them is sampled. Within a block::

    time = speed * size * context * relative
    relative = 1 + entry (if drafts are verified) + row[k] + mixed (if they are unequal)
                 + draft entry (if the MTP layers run) + depth * draft step

``row[k]`` is a term of its own for every number ``k`` of draft tokens per request, so
no shape is assumed: CUDA graphs have tiers, and on a CPU a second row is dear and the
next ones nearly free. ``speed`` is a random walk that all kinds of steps share: a
machine that changes speed makes none of them dearer beside the others. An extended
Kalman filter learns the logarithm's linear terms and ``relative`` jointly, so that what
a jump of the speed was first taken for is put right by the steps that follow.

Steps with prefill teach nothing. Steps with a KV backfill teach its price alone.
"""

import math
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_mtp.records import StepOutcome

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

SPEED_VARIANCE = 2e-4
"""Growth of the variance of log speed in each step: a shared machine wanders by several
percent within seconds."""
_FORGET = 1.0 / 4000.0
"""Share of what is known of a block's terms that a step makes uncertain again."""
_FIRST_STEPS = 3
"""Steps of a new kind of batch of which the fastest sets the speed: caches are cold,
and a disturbed step takes ten times as long."""
_MAX_CLIP = 3.0
"""Standard deviations that a step's time counts for at most."""
_BACKFILL_TOKENS = 256.0
"""Tokens of KV backfill before their price is believed: it contains a step's noise."""


class CostPrior(NamedTuple):
    """Relative times before any step, in steps without speculation.

    A pass takes as long as reading the weights or as its arithmetic, with a soft knee
    (roofline).
    """

    bound_rows: float = 256.0
    """Rows whose arithmetic takes as long as reading the weights."""
    row_cost: float = 0.03
    """Of one more row for every request, beside that."""
    draft_cost: float = 0.08
    """Of a draft step: one layer and the head, of some dozens of layers."""


CPU_COST_PRIOR = CostPrior(bound_rows=16.0)
"""CPU cores become bound by arithmetic between 5 and 64 rows."""

_ENTRY_DEVIATION = 0.15
"""Of entry terms and of draft steps, relative times."""
_ROW_DEVIATION = 0.12
"""Of the slope of ``row``; of a single term beside it a third of that."""

_MAX_DIP = 0.03
"""Of a plain step, by which one more draft token may make a pass cheaper: seen on CPUs,
where kernels for few rows differ."""

# Places of the terms: logarithms first, then relative times.
_SPEED, _SIZE, _CONTEXT, _ENTRY, _MIXED, _DRAFT_ENTRY, _DRAFT, _ROWS = range(8)
_ROUNDING = 1e-9
_LEAST = 0.3
"""Least relative time that is believed."""


@cache
def request_bucket(num_requests: int) -> int:
    """Smallest bucket bound >= ``num_requests``: 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    if num_requests <= 4:
        return max(num_requests, 1)
    bound = 1 << (num_requests - 1).bit_length()
    return 3 * bound // 4 if num_requests <= 3 * bound // 4 else bound


class _Block:
    """Beliefs about one kind of batch."""

    __slots__ = ("covariance", "mean", "num_plain", "num_seen", "updated_at")

    def __init__(self, mean: Vector, covariance: Matrix, now_step: int) -> None:
        self.mean, self.covariance, self.updated_at = mean, covariance, now_step
        self.num_seen = 0
        self.num_plain = 0
        """Steps without speculation that were seen, of batches of half to twice the
        size, too."""


class Times:
    """Times of the steps of one batch, as of now: expected ones, or a sample."""

    def __init__(self, scale_s: float, terms: Sequence[float]) -> None:
        """Take what is believed.

        Args:
            scale_s: Seconds of a step without speculation.
            terms: Relative ones, from the entry on.
        """
        self._scale_s = scale_s
        self._entry, self._mixed, self._draft_entry, self._draft = terms[:4]
        rows = accumulate((0.0, *terms[4:]), lambda a, b: max(a - _MAX_DIP, b))
        self._rows: tuple[float, ...] = tuple(rows)

    def seconds(
        self, draft_tokens: float, depth: int, is_uniform: bool = True
    ) -> float:
        """Of one step.

        Args:
            draft_tokens: Verified, per request in the mean.
            depth: Draft steps.
            is_uniform: All requests have equally many.
        """
        rows, longest = self._rows, len(self._rows) - 1
        lower = min(int(draft_tokens), longest - 1)
        share = draft_tokens - lower
        relative = 1.0 + rows[lower] + share * (rows[lower + 1] - rows[lower])
        if draft_tokens > 0.0:
            relative += self._entry
            if not is_uniform:
                relative += self._mixed
        # The MTP layers pass over verified rows, too, where nothing is drafted.
        passes = depth or (draft_tokens > 0.0)
        if passes:
            relative += self._draft_entry + passes * self._draft
        return self._scale_s * max(relative, _LEAST)


class CostModel:
    """Learns step times, answers with expected or sampled ones."""

    def __init__(self, max_draft_length: int, prior: CostPrior | None = None) -> None:
        self.max_draft_length = max_draft_length
        self.noise = 0.1
        """Typical deviation of a step's log time."""
        self._prior = prior or CostPrior()
        self._blocks: dict[tuple[int, bool], _Block] = {}
        self._num_steps = 0
        self._backfill_s = self._backfill_tokens = 0.0

    @property
    def backfill_token_s(self) -> float:
        """Seconds of one token of KV backfill."""
        return self._backfill_s / (self._backfill_tokens + _BACKFILL_TOKENS)

    # -- answers ------------------------------------------------------------------

    def needs_plain_step(self, num_requests: int, is_greedy: bool) -> bool:
        """No two steps without speculation were seen of such batches: what drafting
        costs beside them, and so the promise to users, would rest on a guess."""
        return self._block((request_bucket(num_requests), is_greedy)).num_plain < 2

    def times(
        self,
        num_requests: int,
        context: float,
        is_greedy: bool,
        random: Random | None = None,
    ) -> Times:
        """Times of every decision for a batch.

        Args:
            num_requests: That decode, >= 1.
            context: Mean context length, tokens.
            is_greedy: None of them is sampled.
            random: Draws a sample of the posterior; None for its mean.
        """
        key = (request_bucket(num_requests), is_greedy)
        block = self._block(key)
        mean = block.mean
        size, long = _size_and_context(num_requests, key[0], context)
        scale_s = _scale_s(mean, size, long)
        terms = mean[_ENTRY:].tolist()
        if random is not None:
            terms = [
                a + b for a, b in zip(terms, _deviation(block, random), strict=True)
            ]
        return Times(scale_s, terms)

    # -- learning -----------------------------------------------------------------

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a step; one without a sane time is ignored."""
        self._num_steps += 1
        num_requests, seconds = outcome.num_decode_requests, outcome.step_time_s
        if (
            outcome.num_prefill_tokens
            or num_requests <= 0
            or not 1e-7 < seconds < 3600.0
        ):
            return
        key = (request_bucket(num_requests), outcome.is_greedy)
        block = self._block(key)
        extra = outcome.num_scheduled_tokens - num_requests
        extra = min(max(extra, 0), num_requests * self.max_draft_length)
        length = extra / num_requests
        depth = min(max(outcome.draft_depth, 0), self.max_draft_length)
        is_uniform = length == int(length) and all(
            r.num_draft_tokens == length for r in outcome.requests
        )
        context = outcome.num_context_tokens / num_requests
        size, long = _size_and_context(num_requests, key[0], context)
        slope = self._features(length, depth, is_uniform)
        relative = max(1.0 + float((slope * block.mean).sum()), _LEAST)
        slope /= relative
        slope[:_ENTRY] = 1.0, size, long
        scale_s = _scale_s(block.mean, size, long)
        if outcome.num_catch_up_tokens:
            self._learn_backfill(outcome, scale_s * relative)
            return
        block.num_plain += not (length or depth)
        self._age(block)
        error = math.log(seconds / scale_s / relative)
        if block.num_seen > _FIRST_STEPS:
            self._learn(block, slope, error)
        elif error < 0.0 or block.num_seen == 1:
            block.mean[_SPEED] += error
            block.covariance[_SPEED, :] = block.covariance[:, _SPEED] = 0.0
            block.covariance[_SPEED, _SPEED] = self.noise**2

    def _features(self, length: float, depth: int, is_uniform: bool) -> Vector:
        """Of the relative time; those of the logarithm are 0."""
        features = np.zeros(_ROWS + self.max_draft_length)
        if length > 0.0:
            features[_ENTRY] = 1.0
            features[_MIXED] = not is_uniform
            lower = min(int(length), self.max_draft_length - 1)
            features[_ROWS + lower] = length - lower
            if lower:
                features[_ROWS + lower - 1] = 1.0 + lower - length
        passes = depth or (length > 0.0)
        features[_DRAFT_ENTRY] = bool(passes)
        features[_DRAFT] = passes
        return features

    def _age(self, block: _Block) -> None:
        """Time makes uncertain again."""
        elapsed = self._num_steps - block.updated_at
        block.updated_at = self._num_steps
        block.num_seen += 1
        prior = _prior_covariance(self.max_draft_length, 0.0)
        block.covariance += min(_FORGET * elapsed, 1.0) * (prior - block.covariance)
        block.covariance[_SPEED, _SPEED] += SPEED_VARIANCE * elapsed

    def _learn(self, block: _Block, slope: Vector, error: float) -> None:
        """One step of the filter.

        Args:
            block: Beliefs about the batch.
            slope: Of the logarithm of the time, by each term.
            error: Logarithm of the time over what was expected.
        """
        cross = (block.covariance * slope).sum(axis=1)
        doubt = float((cross * slope).sum())
        variance = doubt + self.noise**2
        most = _MAX_CLIP * math.sqrt(variance)
        if doubt < self.noise**2:
            typical = 1.25 * min(abs(error), _MAX_CLIP * self.noise)
            self.noise = max(self.noise + 0.02 * (typical - self.noise), 0.005)
        block.mean += cross * (min(max(error, -most), most) / variance)
        block.covariance -= np.outer(cross / variance, cross)

    def _learn_backfill(self, outcome: StepOutcome, usual_s: float) -> None:
        extra_s = min(max(outcome.step_time_s - usual_s, 0.0), _MAX_CLIP * usual_s)
        self._backfill_s += extra_s - 0.05 * self._backfill_s
        self._backfill_tokens += (
            outcome.num_catch_up_tokens - 0.05 * self._backfill_tokens
        )

    # -- blocks -------------------------------------------------------------------

    def _block(self, key: tuple[int, bool]) -> _Block:
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = self._first(key)
        return block

    def _first(self, key: tuple[int, bool]) -> _Block:
        """Beliefs about a new block: the prior, or the nearest block's by rows."""
        known = [k for k, b in self._blocks.items() if b.updated_at]
        own = _prior_mean(self.max_draft_length, self._prior, key[0])
        curvature = _arithmetic(self._prior, key[0])
        covariance = _prior_covariance(self.max_draft_length, curvature).copy()
        if not known:
            covariance[_SPEED, _SPEED] = 100.0
            return _Block(own, covariance, 0)

        def distance(other: tuple[int, bool]) -> tuple[float, tuple[int, bool]]:
            sizes = abs(math.log2(other[0] / key[0]))
            return sizes + 0.5 * (other[1] != key[1]), other

        near = min(known, key=distance)
        block = self._blocks[near]
        away = distance(near)[0]
        mean = _moved(block.mean, key[0] / near[0])
        share = min(0.2 + 0.2 * away, 1.0)
        covariance = block.covariance + share * (covariance - block.covariance)
        covariance[_SPEED, _SPEED] += 0.1 * away
        first = _Block(mean, covariance, 0)
        if away <= 1.0 and near[1] == key[1]:
            first.num_plain, first.num_seen = block.num_plain, block.num_seen
        return first


def _scale_s(mean: Vector, size: float, long: float) -> float:
    """Seconds of a step without speculation."""
    log_s = mean[_SPEED] + size * mean[_SIZE] + long * mean[_CONTEXT]
    return math.exp(min(max(log_s, -50.0), 50.0))


def _size_and_context(
    num_requests: int, bucket: int, context: float
) -> tuple[float, float]:
    """Features of the batch: its size within the bucket, and its context length."""
    return math.log(num_requests / bucket), math.log1p(context / 1024.0)


def _arithmetic(prior: CostPrior, num_requests: int) -> float:
    """Relative time that one more row for every request takes in arithmetic."""
    one, two = (math.hypot(1.0, n * num_requests / prior.bound_rows) for n in (1, 2))
    return two / one - 1.0


@cache
def _prior_covariance(max_draft_length: int, by_arithmetic: float) -> Matrix:
    size = _ROWS + max_draft_length
    covariance = np.zeros((size, size))
    deviations = (0.1, 0.3, 0.1, *[_ENTRY_DEVIATION] * 3, _ENTRY_DEVIATION / 2)
    for i, deviation in enumerate(deviations):
        covariance[i, i] = deviation**2
    k = np.arange(1.0, max_draft_length + 1)
    slope = _ROW_DEVIATION**2 + by_arithmetic**2
    rows = slope * np.outer(k, k) + (_ROW_DEVIATION / 3) ** 2 * np.eye(max_draft_length)
    covariance[_ROWS:, _ROWS:] = rows
    return covariance


@cache
def _prior_tail(max_draft_length: int, prior: CostPrior, num_requests: int) -> Vector:
    k = np.arange(1.0, max_draft_length + 1)
    plain = math.hypot(1.0, num_requests / prior.bound_rows)
    rows = np.hypot(1.0, num_requests * (1.0 + k) / prior.bound_rows) / plain - 1.0
    result: Vector = rows + prior.row_cost * k
    return result


def _prior_mean(max_draft_length: int, prior: CostPrior, num_requests: int) -> Vector:
    mean = np.zeros(_ROWS + max_draft_length)
    mean[_SIZE] = 0.3
    mean[_CONTEXT] = 0.03
    mean[_ENTRY] = 0.03
    mean[_DRAFT_ENTRY] = 0.03
    mean[_DRAFT] = prior.draft_cost
    mean[_ROWS:] = _prior_tail(max_draft_length, prior, num_requests)
    return mean


def _moved(mean: Vector, ratio: float) -> Vector:
    """Beliefs about batches ``ratio`` times as large: a pass is taken by its rows."""
    longest = len(mean) - _ROWS
    curve = np.concatenate([[0.0], mean[_ROWS:]])
    tokens = np.arange(longest + 1.0)
    slope = max(curve[-1] - curve[0], 0.0) / longest
    asked = np.clip(ratio, 0.25, 4.0) * (1.0 + tokens) - 1.0
    seen = np.interp(asked, tokens, curve)
    seen += slope * (np.maximum(asked - longest, 0.0) + np.minimum(asked, 0.0))
    growth = max(1.0 + seen[0], _LEAST)
    moved = mean.copy()
    moved[_SPEED] += math.log(growth)
    moved[_ENTRY:_ROWS] /= growth
    moved[_ROWS:] = (seen[1:] - seen[0]) / growth
    return moved


def _deviation(block: _Block, random: Random) -> list[float]:
    """Of a sample of the relative terms from their means."""
    tail = block.covariance[_ENTRY:, _ENTRY:]
    try:
        root = np.linalg.cholesky(tail + _ROUNDING * np.eye(len(tail)))
    except np.linalg.LinAlgError:  # rounding, after very many steps
        block.covariance[:] = np.diag(np.diag(block.covariance).clip(_ROUNDING))
        root = np.sqrt(block.covariance[_ENTRY:, _ENTRY:])
    noise = np.array([random.gauss(0.0, 1.0) for _ in range(len(tail))])
    result: list[float] = (root * noise).sum(axis=1).tolist()
    return result
