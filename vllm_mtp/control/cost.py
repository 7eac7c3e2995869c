"""What a step costs: Bayesian regression of the logarithm of step times.

A batch decides the *block*: a bucket of the number of decoding requests, and whether
any of them is sampled. Each block has terms of its own (`step_times`), and starts from
those of the nearest one. Among them ``speed`` is a random walk that all kinds of steps
share: a machine that changes speed makes none of them dearer beside the others. An
extended Kalman filter learns all terms jointly, so that what a jump of the speed was
first taken for is put right by the steps that follow.

Steps with prefill teach nothing. Steps with a KV backfill teach its price alone.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from random import Random
from statistics import median_high, median_low
from typing import NamedTuple

import numpy as np

from vllm_mtp.control.step_times import (
    CONTEXT,
    ENTRY,
    LEAST_TIME,
    SIZE,
    SPEED,
    CostPrior,
    Matrix,
    Times,
    Vector,
    features,
    moved,
    prior_covariance,
    prior_mean,
    request_bucket,
)
from vllm_mtp.records import StepOutcome

UNKNOWN_SPEED = 100.0
"""Variance of log speed before any step: microseconds and minutes are as likely."""
SPEED_VARIANCE = 2e-4
"""Growth of the variance of log speed in each step: a shared machine wanders by several
percent within seconds."""
FORGET_STEPS = 4000.0
"""Steps after which what is known of a block's terms is forgotten."""
MAX_DEVIATIONS = 3.0
"""Standard deviations that a step's time counts for at most."""
BACKFILL_TOKENS = 256.0
"""Tokens of KV backfill before their price is believed: it contains a step's noise. A
twentieth of what is known of it is forgotten with each backfill."""

_ROUNDING = 1e-9
_Key = tuple[int, bool]
"""(bucket of requests, none is sampled)"""


class _Block:
    """Beliefs about one kind of batch."""

    __slots__ = ("covariance", "mean", "num_plain", "updated_at")

    def __init__(self, mean: Vector, covariance: Matrix) -> None:
        self.mean, self.covariance, self.updated_at = mean, covariance, 0
        self.num_plain = 0
        """Steps without speculation that took about what was expected; of batches of
        half to twice the size, too."""

    def scale_s(self, size: float, context: float) -> float:
        """Seconds of a step without speculation."""
        mean = self.mean
        log_s = mean[SPEED] + size * mean[SIZE] + context * mean[CONTEXT]
        return math.exp(min(max(log_s, -50.0), 50.0))

    def sampled(self, random: Random) -> list[float]:
        """Relative terms in a sample of the posterior."""
        tail = self.covariance[ENTRY:, ENTRY:]
        try:
            root = np.linalg.cholesky(tail + _ROUNDING * np.eye(len(tail)))
        except np.linalg.LinAlgError:  # rounding, after very many steps
            self.covariance[:] = np.diag(np.diag(self.covariance).clip(_ROUNDING))
            root = np.sqrt(self.covariance[ENTRY:, ENTRY:])
        noise = np.array([random.gauss(0.0, 1.0) for _ in range(len(tail))])
        found: list[float] = (self.mean[ENTRY:] + (root * noise).sum(axis=1)).tolist()
        return found


class _Shape(NamedTuple):
    """Of a step, as far as its time goes; draft tokens are per request in the mean."""

    num_requests: int
    is_greedy: bool
    draft_tokens: float
    depth: int
    is_uniform: bool
    has_backfill: bool


def _typical(errors: Sequence[float], most: float) -> float:
    """Mean of errors, each of which moves it by ``most``; equals are no outliers."""
    usual = min(median_low(errors), median_high(errors), key=abs)
    shift = min(max(usual, -len(errors) * most), len(errors) * most)
    beside = (min(max(error - usual, -most), most) for error in errors)
    return shift + sum(beside) / len(errors)


class CostModel:
    """Learns step times, answers with expected or sampled ones."""

    def __init__(self, max_draft_length: int, prior: CostPrior | None = None) -> None:
        """Start from a prior.

        Args:
            max_draft_length: Upper bound on K.
            prior: Relative times before any step.
        """
        self.max_draft_length = max_draft_length
        self.noise = 0.1
        """Typical deviation of a step's log time."""
        self._prior = prior or CostPrior()
        self._blocks: dict[_Key, _Block] = {}
        self._num_steps = 0
        self._backfill_s = self._backfill_tokens = 0.0

    @property
    def backfill_token_s(self) -> float:
        """Seconds of one token of KV backfill."""
        return self._backfill_s / (self._backfill_tokens + BACKFILL_TOKENS)

    # -- answers ------------------------------------------------------------------

    def num_plain_steps(self, num_requests: int, is_greedy: bool) -> int:
        """Steps without speculation of such batches that took what was expected."""
        return self._block((request_bucket(num_requests), is_greedy)).num_plain

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
        terms = block.mean[ENTRY:].tolist() if random is None else block.sampled(random)
        return Times(block.scale_s(*_logarithms(num_requests, context)), terms)

    # -- learning -----------------------------------------------------------------

    def observe(self, *outcomes: StepOutcome) -> None:
        """Learn from steps in their order; those without a sane time are ignored.

        Neighbours that are alike are learned at once, which takes as long as one.
        """
        for shape, alike in groupby(outcomes, self._shape_of):
            steps = list(alike)
            self._num_steps += len(steps)
            if shape is not None:
                self._learn(shape, steps)

    def _shape_of(self, outcome: StepOutcome) -> _Shape | None:
        """What steps that are alike have in common; None if it teaches nothing."""
        num_requests, seconds = outcome.num_decode_requests, outcome.step_time_s
        if outcome.num_prefill_tokens or num_requests <= 0:
            return None
        if not 1e-7 < seconds < 3600.0:  # a clock that jumped
            return None
        extra = max(outcome.num_scheduled_tokens - num_requests, 0)
        length = min(extra / num_requests, float(self.max_draft_length))
        return _Shape(
            num_requests,
            outcome.is_greedy,
            length,
            min(max(outcome.draft_depth, 0), self.max_draft_length),
            all(r.num_draft_tokens == length for r in outcome.requests),
            outcome.num_backfill_tokens > 0,
        )

    def _age(self, block: _Block) -> None:
        """Time makes uncertain again."""
        elapsed = self._num_steps - block.updated_at
        block.updated_at = self._num_steps
        prior = prior_covariance(self.max_draft_length, None)
        forgotten = min(elapsed / FORGET_STEPS, 1.0)
        block.covariance += forgotten * (prior - block.covariance)
        block.covariance[SPEED, SPEED] += SPEED_VARIANCE * elapsed

    def _learn(self, shape: _Shape, steps: Sequence[StepOutcome]) -> None:
        """One step of the filter, from the mean of the logarithms of steps' times."""
        num_requests, is_greedy, length, depth, is_uniform, has_backfill = shape
        block = self._block((request_bucket(num_requests), is_greedy))
        mean_context = steps[len(steps) // 2].num_context_tokens / num_requests
        size, context = _logarithms(num_requests, mean_context)
        slope = features(self.max_draft_length, length, depth, is_uniform)
        relative = max(1.0 + float((slope * block.mean).sum()), LEAST_TIME)
        expected_s = block.scale_s(size, context) * relative
        if has_backfill:
            for step in steps:
                self._learn_backfill(step, expected_s)
            return
        slope /= relative
        slope[:ENTRY] = 1.0, size, context
        self._age(block)
        cross = (block.covariance * slope).sum(axis=1)
        doubt = float((cross * slope).sum())
        # The first step of all may be wrong by a factor: caches are cold.
        noise_variance = 1.0 if doubt >= UNKNOWN_SPEED else self.noise**2
        most = MAX_DEVIATIONS * math.sqrt(doubt + noise_variance)
        errors = [math.log(step.step_time_s / expected_s) for step in steps]
        if doubt < self.noise**2:
            for error in errors:
                typical = 1.25 * min(abs(error), MAX_DEVIATIONS * self.noise)
                self.noise = max(self.noise + 0.02 * (typical - self.noise), 0.005)
        variance = doubt + noise_variance / len(steps)
        block.mean += cross * (_typical(errors, most) / variance)
        block.covariance -= np.outer(cross / variance, cross)
        if not (length or depth):
            block.num_plain += sum(abs(error) <= most for error in errors)

    def _learn_backfill(self, outcome: StepOutcome, usual_s: float) -> None:
        extra_s = min(max(outcome.step_time_s - usual_s, 0.0), 3.0 * usual_s)
        self._backfill_s += extra_s - 0.05 * self._backfill_s
        tokens = outcome.num_backfill_tokens
        self._backfill_tokens += tokens - 0.05 * self._backfill_tokens

    # -- blocks -------------------------------------------------------------------

    def _block(self, key: _Key) -> _Block:
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = self._first(key)
        return block

    def _first(self, key: _Key) -> _Block:
        """Beliefs about a new block: the nearest one's by rows, or the prior.

        An octave of size doubts a fifth more of what is known; a block within one
        needs no plain steps of its own.
        """
        known = [k for k, block in self._blocks.items() if block.updated_at]
        covariance = prior_covariance(self.max_draft_length, self._prior, key[0]).copy()
        if not known:
            covariance[SPEED, SPEED] = UNKNOWN_SPEED
            mean = prior_mean(self.max_draft_length, self._prior, key[0])
            return _Block(mean, covariance)
        away, near = min((_distance(key, other), other) for other in known)
        block = self._blocks[near]
        share = min(0.2 + 0.2 * away, 1.0)
        covariance = block.covariance + share * (covariance - block.covariance)
        covariance[SPEED, SPEED] += 0.1 * away
        first = _Block(moved(block.mean, key[0] / near[0]), covariance)
        if away <= 1.0 and near[1] == key[1]:
            first.num_plain = block.num_plain
        return first


def _distance(key: _Key, other: _Key) -> float:
    """Octaves between two sizes; sampling counts half of one."""
    return abs(math.log2(other[0] / key[0])) + 0.5 * (other[1] != key[1])


def _logarithms(num_requests: int, context: float) -> tuple[float, float]:
    """Features of the batch: its size within the bucket, and its context length."""
    size = math.log(num_requests / request_bucket(num_requests))
    return size, math.log1p(context / 1024.0)
