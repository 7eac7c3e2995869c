"""What a step costs, learned from the engine's own steps.

The batch decides the *block*: a bucket of the number of decoding requests, one of
their mean context length, and whether any of them is sampled. Each block has beliefs
of its own (`step_times`); a new one starts from those of the nearest block that was
visited, taken by the rows of a pass.

Robust: a step's time counts for as much as three typical deviations at most, unless
steps in a row are that far off: then beliefs are wrong. Drift: what makes all steps
slower at once (a busy machine) is told from what makes one kind of step dearer, because
the former is by far the more frequent.

Steps with prefill tell nothing about drafts and are ignored. Steps in which the MTP
layers caught up on what they missed teach the price of catching up and nothing else.
"""

import math
import statistics
from collections.abc import Sequence
from functools import cache

from benchmarks.control.previous.batch_kind import BatchKind, kind_of
from benchmarks.control.previous.expected_times import ExpectedTimes
from benchmarks.control.previous.jumps import Jumps, mean_variance
from benchmarks.control.previous.step_times import (
    CostPrior,
    Estimate,
    Layout,
    StepTimes,
    moved,
    prior_shape,
)
from vllm_mtp.records import StepOutcome

_HALF_LIFE_STEPS = 10000.0
"""Of what is known about a kind of step that is never visited again."""
_MAX_LEVEL_VARIANCE = 0.03
"""Growth of the variance of all times together, as `Jumps.variance`, in all the time
between two visits."""
_MAX_PENDING = 32
"""Equal steps in a row are averaged, at most so many."""
_FIRST_STEPS = 20
"""While a block is so young, a much faster step shows that its scale was set by a
disturbed one."""
_WRONG_DEVIATIONS, _WRONG_SHARE, _WRONG_STEPS = 3.0, 0.6, 5
"""So many steps in a row that are off by so many deviations, and by so much of what was
expected, show that it is wrong; plain steps among them count if they take what they
should. Less may be a neighbour of this machine: when two steps
were enough, drafting was believed to be dear after a burst of slow steps, was given up,
and therefore never seen to be cheap again."""
_VISITS_WITHOUT_PLAIN = 48
"""So many steps with drafts are enough to guess what one without takes."""
_OTHER_SAMPLING = 0.5
"""Distance of batches that are sampled from those that are not, in doublings of the
number of requests. Verifying 16 rows of 16,384 tokens and drawing as many drafts took
20 ms of 120 that finding the likeliest tokens did not. Taken for the same kind of
batch, sampled ones were drafted for at a loss of 13 %, and greedy ones, after them, not
where that gains 12 %."""
_MIN_STEP_S, _MAX_STEP_S = 1e-7, 3600.0
"""What took less or more is no step: the clock jumped, or the machine slept."""


class _Pending:
    """Equal steps in a row that wait to be learned."""

    __slots__ = ("expected", "features", "seconds", "total")

    def __init__(self, features: Sequence[float], expected: Estimate) -> None:
        self.features = features
        self.expected = expected
        """Relative time, as of before these steps."""
        self.total = 0.0
        """Their relative times, summed, each bounded."""
        self.seconds: list[float] = []
        """Their times as they were, of a batch of the block's own size."""

    @property
    def num_steps(self) -> int:
        return len(self.seconds)


class _CaughtUp:
    """Time and tokens of the catch-up passes so far, recent ones counting most."""

    seconds = 0.0
    num_tokens = 0.0


class _Block:
    """Beliefs about a bucket of batches."""

    def __init__(self, num_requests: int, times: StepTimes, now_step: int) -> None:
        self.num_requests = num_requests
        self.times = times
        self.slope = 0.5
        """Growth of the time with the number of requests, 0 (none) .. 1."""
        self.num_visits = 0
        self.has_plain_steps = False
        """A step that neither drafts nor verifies was seen."""
        self.num_wrong = 0
        """Steps in a row that took far more than expected, or far less (negative), and
        plain ones among them that did not."""
        self.aged_at = now_step
        """Step up to which time has made everything uncertain."""

    def factor(self, num_requests: int) -> float:
        """Time of a batch over that of the block's own size."""
        return 1.0 + self.slope * (num_requests / self.num_requests - 1.0)


class CostModel:
    """Learns step times, answers with expected ones for any decision."""

    def __init__(self, max_draft_length: int, prior: CostPrior | None = None) -> None:
        """Start from a prior.

        Args:
            max_draft_length: Upper bound on K.
            prior: Relative times before any step.
        """
        self.max_draft_length = max_draft_length
        self.noise = 0.1
        """Typical deviation of a step's time, as a fraction."""
        self._caught_up = _CaughtUp()
        self._jumps = Jumps()
        self._layout = Layout(max_draft_length)
        self._prior = prior or CostPrior()
        self._shape = prior_shape(self._layout, self._prior)
        self._forget = math.log(2) / _HALF_LIFE_STEPS
        self._blocks: dict[BatchKind, _Block] = {}
        self._pending: dict[BatchKind, _Pending] = {}
        self._num_steps = 0
        self._uniform = cache(self._layout.uniform)

    def times(
        self, num_requests: int, context_per_request: float, is_greedy: bool = True
    ) -> ExpectedTimes:
        """Expected time of every decision for a batch.

        Args:
            num_requests: Requests that decode, >= 1.
            context_per_request: Their mean context length, tokens.
            is_greedy: None of them is sampled.
        """
        self._learn_pending()
        block = self._block(kind_of(num_requests, context_per_request, is_greedy))
        scale_s = block.times.scale_s or 1.0
        guesses_plain = (
            not block.has_plain_steps and block.num_visits >= _VISITS_WITHOUT_PLAIN
        )
        return ExpectedTimes(
            self._layout,
            block.times,
            scale_s * block.factor(num_requests),
            guesses_plain,
        )

    # -- learning -----------------------------------------------------------------

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a step; one with prefill, or without a sane time, is ignored."""
        self._num_steps += 1
        seconds = outcome.step_time_s
        num_requests = outcome.num_decode_requests
        if outcome.num_prefill_tokens or not _MIN_STEP_S < seconds < _MAX_STEP_S:
            return
        if num_requests <= 0 or outcome.num_scheduled_tokens < num_requests:
            return
        context = outcome.num_context_tokens / num_requests
        key = kind_of(num_requests, context, outcome.is_greedy)
        block = self._block(key)
        features = self._features(outcome)
        if outcome.num_backfill_tokens:
            self._learn_catch_up(block, features, outcome)
            return
        if not block.times.is_known:
            expected = block.times.relative(features).seconds
            block.times.scale_s = seconds / expected / block.factor(num_requests)
        self._note(key, features, num_requests, seconds)

    def _features(self, outcome: StepOutcome) -> Sequence[float]:
        num_requests = outcome.num_decode_requests
        depth = min(max(outcome.draft_depth, 0), self.max_draft_length)
        extra = outcome.num_scheduled_tokens - num_requests
        extra = min(extra, num_requests * self.max_draft_length)
        length, rest = divmod(extra, num_requests)
        if rest == 0 and all(r[1] == length for r in outcome.requests):
            features = self._uniform(length, depth)
        else:
            features = self._layout.mixed(extra / num_requests, depth)
        return self._layout.undrafted(features) if extra and not depth else features

    def _note(
        self,
        key: BatchKind,
        features: Sequence[float],
        num_requests: int,
        seconds: float,
    ) -> None:
        block = self._blocks[key]
        pending = self._pending.get(key)
        if (
            pending is None
            or (pending.features is not features and pending.features != features)
            or pending.num_steps >= _MAX_PENDING
        ):
            self._learn_pending()
            pending = _Pending(features, block.times.relative(features))
            self._pending[key] = pending
        own_s = seconds / block.factor(num_requests)
        pending.seconds.append(own_s)
        relative = own_s / block.times.scale_s
        block.num_visits += 1
        expected = pending.expected.seconds
        if block.num_visits <= _FIRST_STEPS and relative < 0.6 * expected:
            block.times.scale_s *= relative / expected
            relative = expected
        pending.total += self._clip(block, pending.expected, relative, num_requests)

    def _clip(
        self,
        block: _Block,
        estimate: Estimate,
        relative: float,
        num_requests: int,
    ) -> float:
        expected, doubt = estimate
        surprise = relative / expected - 1.0
        bound = 3.0 * math.hypot(self.noise, doubt)
        clipped = min(max(surprise, -bound), bound)
        # May grow slowly at most, so that a spike does not open the door to the next,
        # while a lasting change is not clipped for long.
        if doubt < self.noise:
            typical = 1.25 * min(abs(surprise), 3.0 * self.noise)
            self.noise += 0.02 * (typical - self.noise)
            self.noise = min(max(self.noise, 0.005), 1.0)
        size = num_requests / block.num_requests - 1.0
        block.slope = min(max(block.slope + 0.5 * clipped * size, 0.0), 1.0)
        return expected * (1.0 + clipped)

    def _learn_pending(self) -> None:
        for key, pending in self._pending.items():
            self._learn_group(key, pending)
        self._pending.clear()

    def _learn_group(self, key: BatchKind, pending: _Pending) -> None:
        block = self._blocks[key]
        times = block.times
        block.has_plain_steps |= pending.features == self._uniform(0, 0)
        kind = (key, pending.features)
        jumped = self._jumps.learn(kind, pending.seconds, self.noise)
        elapsed = self._num_steps - block.aged_at
        block.aged_at = self._num_steps
        wandered = min(self._jumps.variance * elapsed, _MAX_LEVEL_VARIANCE)
        forgotten = 1.0 - math.exp(-self._forget * elapsed)
        times.age(self._shape, forgotten, wandered + jumped)
        noise = self.noise * math.sqrt(mean_variance(pending.num_steps))
        relative = pending.total / pending.num_steps
        # The lower one of two, so that a single spike is none of a pair.
        typical = statistics.median_low(pending.seconds) / times.scale_s
        error = self._error(block, pending, typical, noise)
        if error:
            times.doubt(self._shape, pending.features, 0.5 * error**2)
            relative = typical
        times.learn(pending.features, relative, noise * relative)

    def _error(
        self, block: _Block, pending: _Pending, typical: float, noise: float
    ) -> float:
        """By how much beliefs about drafts are wrong; 0 if too few steps say so.

        Not of plain steps: what they take is the level. One that takes what it should,
        right after drafts that did not, says that it is not the machine.
        """
        is_plain = pending.features == self._uniform(0, 0)
        if is_plain and not block.num_wrong:
            return 0.0
        expected, doubt = block.times.relative(pending.features)
        error = typical - expected
        usual = math.hypot(doubt * expected, noise * typical)
        if is_plain:
            if abs(error) > _WRONG_DEVIATIONS * usual:
                block.num_wrong = 0
            else:
                block.num_wrong += 1 if block.num_wrong > 0 else -1
            return 0.0
        if abs(error) <= max(_WRONG_DEVIATIONS * usual, _WRONG_SHARE * expected):
            block.num_wrong = 0
            return 0.0
        if block.num_wrong * error < 0:
            block.num_wrong = 0
        block.num_wrong += round(math.copysign(pending.num_steps, error))
        return error if abs(block.num_wrong) >= _WRONG_STEPS else 0.0

    def _learn_catch_up(
        self, block: _Block, features: Sequence[float], outcome: StepOutcome
    ) -> None:
        if not block.times.is_known:
            return
        scale_s = block.times.scale_s * block.factor(outcome.num_decode_requests)
        usual_s = block.times.relative(features).seconds * scale_s
        extra_s = min(max(outcome.step_time_s - usual_s, 0.0), 3.0 * usual_s)
        known = self._caught_up
        known.seconds += extra_s - 0.05 * known.seconds
        known.num_tokens += outcome.num_backfill_tokens - 0.05 * known.num_tokens

    @property
    def catch_up_token_s(self) -> float:
        """Seconds of one token that the MTP layers catch up on."""
        # A few tokens say nothing: the noise of the whole step is in their time.
        return self._caught_up.seconds / (self._caught_up.num_tokens + 256.0)

    # -- blocks -------------------------------------------------------------------

    def _block(self, key: BatchKind) -> _Block:
        block = self._blocks.get(key)
        if block is None:
            block = _Block(key.num_requests, self._first_times(key), self._num_steps)
            self._blocks[key] = block
        return block

    def _first_times(self, key: BatchKind) -> StepTimes:
        """Beliefs of the nearest block that was visited, less certain.

        Four requests are not one with all times in proportion: four drafts of each are
        20 rows there and 5 here. Taken in proportion, drafting in a batch that grew
        from 1 request to 4 was believed to be 10 % cheaper beside plain steps than it
        is (K = 2), for hundreds of steps.
        """

        def distance(other: BatchKind) -> float:
            return (
                abs(math.log2(other.num_requests / key.num_requests))
                + abs(other.context_bucket - key.context_bucket)
                + _OTHER_SAMPLING * (other.is_greedy != key.is_greedy)
            )

        visited = [k for k, block in self._blocks.items() if block.times.is_known]
        if not visited:
            return StepTimes(prior_shape(self._layout, self._prior, key.num_requests))
        nearest = min(visited, key=lambda other: (distance(other), other))
        known = self._blocks[nearest].times
        ratio = key.num_requests / nearest.num_requests
        mean = moved(known.mean, self._layout, ratio)
        times = StepTimes(self._shape._replace(mean=mean, covariance=known.covariance))
        times.age(self._shape, min(0.15 + 0.15 * distance(nearest), 0.8), 0.0)
        return times
