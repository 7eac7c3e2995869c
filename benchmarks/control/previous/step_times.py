"""What one kind of batch costs, as a Bayesian linear model of a step's time.

A step verifies some rows and then drafts some steps deep; the two follow each other,
so their times add::

    time = verify[tier] + overhead (if it drafts) + depth * draft_step

``verify`` is a value of its own for every *tier*, the draft tokens per request that
are verified: no shape is assumed, a pass over four rows may cost less than one over
two. Batches in which every request has equally many draft tokens (one CUDA graph, if
captured) and mixed ones have tiers of their own::

    0 .. K_max                  uniform: k draft tokens for every request
    K_max + 1 .. 3 K_max + 1    mixed: h / 2 draft tokens per request, h = 0 .. 2 K_max

A step that verifies drafts and makes none is not ``verify`` alone: the MTP layers pass
over its rows all the same, since they must not miss them, and only ``choice`` is spared
(the head and sampling). Taken for ``verify``, such a step makes drafting seem cheaper
than it is: measured once, it took 26.9 ms, one that drafts 27.3, and one that neither
drafts nor verifies 19.3::

    time = verify[tier] + overhead + draft_step - choice

Before any step the prior says how tiers hang together: a common level, a jump from one
row to several, a slope, a smooth part, and something of their own. So a visit of one
tier says a little about its neighbours, and many visits let it say nothing but what
was seen. The update is a Kalman filter's; time makes everything uncertain again.

All times are relative to a scale that the first steps set.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Vector = list[float]
Matrix = NDArray[np.float64]

_LEAST_TIME = 0.05
"""No step is believed to take less, relative to the scale."""
_LEAST_SHARE = 0.3
"""Of a pass's time is left, however few rows a smaller batch has."""
_FARTHEST_MOVE = 4.0
"""Ratio of two batches' sizes up to which one tells of the other's rows: farther out
nothing was seen of them, and a little noise in the slope would become the answer."""


class Estimate(NamedTuple):
    """Expected time of a step."""

    seconds: float
    deviation: float
    """Standard deviation of the expectation, as a fraction of it."""


class CostPrior(NamedTuple):
    """Relative times before any was seen, in steps without speculation.

    A pass takes as long as reading the weights or as its arithmetic, whichever is more,
    with a soft knee (the root of the sum of their squares). A draft step reads one
    layer and the head. The deviations admit a batch bound by the other of the two.
    """

    bound_rows: float = math.inf
    """Rows whose arithmetic takes as long as reading the weights; infinite where rows
    are nearly free."""
    row_cost: float = 0.05
    """Of one more row for every request, beside that."""
    draft_cost: float = 0.08
    """Of one draft step for every request."""
    level_deviation: float = 0.3
    jump_deviation: float = 0.15
    """Of the jump from one row to several."""
    row_deviation: float = 0.15
    smooth_deviation: float = 0.06
    own_deviation: float = 0.03
    mixed_deviation: float = 0.05
    """Of what mixed batches cost beyond uniform ones."""
    draft_deviation: float = 0.06
    choice_cost: float = 0.04
    """Of choosing a draft token, beside the MTP layers' pass."""


CPU_COST_PRIOR = CostPrior(bound_rows=16.0, row_cost=0.03)
"""One core of an EPYC with AVX512 in float32 was seen to take as long for 9 rows
(within 6 percent at 1 to 128); more cores, AVX512 for bfloat16 and above all AMX move
that, so it is little more than a guess. Taken for a GPU, the first batch of 16 requests
lost a sixth of its first 60 steps to finding out that 48 drafts take 3.5 plain steps.
With this ``row_cost`` a single request's eight drafts are believed to take what they
are elsewhere: where they were dearer, acceptance that came back was followed more
slowly."""


class Shape(NamedTuple):
    """The prior as a vector and a covariance."""

    mean: Vector
    covariance: Matrix
    apart: Matrix
    """Of the covariance what tiers do not have in common: the level is left out."""


class Layout(NamedTuple):
    """Which entry of the vector is what."""

    max_draft_length: int

    @property
    def num_tiers(self) -> int:
        return 3 * self.max_draft_length + 2

    @property
    def size(self) -> int:
        return self.num_tiers + 3

    def uniform(self, draft_length: int, depth: int) -> Vector:
        """Features of a step whose requests all verify ``draft_length`` tokens."""
        features = [0.0] * self.size
        features[draft_length] = 1.0
        return self._with_depth(features, depth)

    def mixed(self, draft_tokens: float, depth: int) -> Vector:
        """Features of a step of unequal draft lengths, by their mean."""
        features = [0.0] * self.size
        halves = min(max(2.0 * draft_tokens, 0.0), 2.0 * self.max_draft_length)
        lower = min(int(halves), 2 * self.max_draft_length - 1)
        first = self.max_draft_length + 1 + lower
        features[first + 1] = halves - lower
        features[first] = 1.0 - features[first + 1]
        return self._with_depth(features, depth)

    def undrafted(self, features: Vector) -> Vector:
        """The same step, if it verifies drafts and makes none."""
        return [*features[:-3], -1.0, 1.0, 1.0]

    def _with_depth(self, features: Vector, depth: int) -> Vector:
        if depth:
            features[-2] = 1.0
            features[-1] = float(depth)
        return features

    def draft_tokens(self) -> list[tuple[float, bool]]:
        """Draft tokens per request of each tier, and whether it is a mixed one."""
        longest = self.max_draft_length
        uniform = [(float(k), False) for k in range(longest + 1)]
        return uniform + [(h / 2, True) for h in range(2 * longest + 1)]


@cache
def prior_shape(layout: Layout, prior: CostPrior, num_requests: int = 1) -> Shape:
    """What is believed of a batch before the first step of any."""
    tiers = layout.draft_tokens()

    def pass_time(tokens: float) -> float:
        return math.hypot(1.0, num_requests * (1.0 + tokens) / prior.bound_rows)

    mean = [
        (1.0 + prior.row_cost * tokens) * pass_time(tokens) / pass_time(0.0)
        for tokens, _ in tiers
    ]
    mean += [prior.choice_cost, 0.0, prior.draft_cost]
    # Where arithmetic is the bound is a guess, so rows may well be cheap after all.
    # With the usual deviation alone a simulated GPU that was taken for a CPU (32
    # requests) drafted at 0.8 of what is possible, for good.
    by_arithmetic = pass_time(1.0) / pass_time(0.0) - 1.0
    row_variance = prior.row_deviation**2 + by_arithmetic**2
    covariance = np.zeros((layout.size, layout.size))
    for i, (left, left_mixed) in enumerate(tiers):
        for j, (right, right_mixed) in enumerate(tiers):
            covariance[i, j] = (
                prior.level_deviation**2
                + prior.jump_deviation**2 * min(left, right, 1.0)
                + row_variance * left * right
                + prior.smooth_deviation**2 * math.exp(-abs(left - right))
                + prior.mixed_deviation**2 * (left_mixed and right_mixed)
                + prior.own_deviation**2 * (i == j)
            )
    for i in (-3, -2, -1):
        covariance[i, i] = prior.draft_deviation**2
    apart = covariance.copy()
    apart[: len(tiers), : len(tiers)] -= prior.level_deviation**2
    return Shape(mean, covariance, apart)


def moved(mean: Vector, layout: Layout, ratio: float) -> Vector:
    """Beliefs about batches of another size: what a pass takes is due to its rows.

    Args:
        mean: ``[layout.size]`` times of a batch.
        layout: Which entry is what.
        ratio: Requests of the other batch over those of this one, > 0. Drafting takes
            in proportion to a pass without drafts.

    Returns:
        ``[layout.size]`` in units in which a pass without drafts takes as before: the
        deviations of a prior are fractions of that.
    """
    ratio = min(max(ratio, 1.0 / _FARTHEST_MOVE), _FARTHEST_MOVE)
    longest = layout.max_draft_length
    uniform, mixed = mean[: longest + 1], mean[longest + 1 : layout.num_tiers]
    tiers = [
        _at(mixed if is_mixed else uniform, longest, ratio * (1.0 + tokens) - 1.0)
        for tokens, is_mixed in layout.draft_tokens()
    ]
    # Where a pass over more rows seems to take a tenth, noise speaks.
    tiers[0] = max(tiers[0], _LEAST_SHARE * uniform[0], _LEAST_TIME)
    growth = tiers[0] / max(uniform[0], _LEAST_TIME)
    return [tier / growth for tier in tiers] + mean[layout.num_tiers :]


def _at(curve: Vector, longest: int, tokens: float) -> float:
    """Time of a pass over so many draft tokens per request, -1 < ``tokens``."""
    slope = max(curve[-1] - curve[0], 0.0) / longest
    if tokens < 0.0:
        return max(curve[0] + slope * tokens, _LEAST_SHARE * curve[0])
    seen = float(np.interp(tokens, np.linspace(0.0, longest, len(curve)), curve))
    return seen + slope * max(tokens - longest, 0.0)


def _used(features: Sequence[float]) -> list[tuple[int, float]]:
    """Entries that count, and by how much."""
    return [(i, f) for i, f in enumerate(features) if f]


def _variance(used: list[tuple[int, float]], covariance: Matrix) -> float:
    """Of the time that these entries sum to."""
    return math.fsum(f * g * covariance.item(i, j) for i, f in used for j, g in used)


class StepTimes:
    """Beliefs about one kind of batch."""

    def __init__(self, shape: Shape) -> None:
        self.mean = list(shape.mean)
        self.covariance = shape.covariance.copy()
        self.scale_s = 0.0
        """Seconds that 1 stands for; 0 before the first step."""

    @property
    def is_known(self) -> bool:
        """Whether any step has been seen."""
        return self.scale_s > 0

    def relative(self, features: Sequence[float]) -> Estimate:
        """Expected time in units of the scale; its deviation as a fraction."""
        used = _used(features)
        mean = math.fsum(f * self.mean[i] for i, f in used)
        variance = _variance(used, self.covariance)
        mean = max(mean, _LEAST_TIME)
        return Estimate(mean, math.sqrt(max(variance, 0.0)) / mean)

    def mixed_tiers(self, layout: Layout, depth: int) -> Vector:
        """Relative times of all mixed tiers, as `relative` gives them, but at once."""
        drafting = self.mean[-2] + depth * self.mean[-1] if depth else 0.0
        first = layout.max_draft_length + 1
        tiers = self.mean[first : layout.num_tiers]
        return [max(tier + drafting, _LEAST_TIME) for tier in tiers]

    def learn(self, features: Sequence[float], relative: float, noise: float) -> None:
        """One Kalman update.

        Args:
            features: Of the step, see `Layout`.
            relative: Its time in units of the scale.
            noise: Standard deviation of that time, in the same units, > 0.
        """
        used = _used(features)
        expected = math.fsum(f * self.mean[i] for i, f in used)
        # Column by column: a product of matrices is rounded differently on each CPU.
        cross = np.zeros(len(self.mean))
        for i, f in used:
            cross += f * self.covariance[:, i]
        variance = math.fsum(f * cross.item(i) for i, f in used) + noise * noise
        gain = cross / variance
        self.mean = (self.mean + gain * (relative - expected)).tolist()
        self.covariance -= np.outer(gain, cross)

    def doubt(self, shape: Shape, features: Sequence[float], variance: float) -> None:
        """Beliefs were wrong of a kind of step: doubt how kinds of steps differ.

        Where rows cost ten times what the prior says, each step seen makes beliefs
        more certain and hardly less wrong. What all kinds have in common is left as it
        is: how fast the machine is was seen a moment ago.

        Args:
            shape: How much may be doubted.
            features: Of the step.
            variance: That its expected time should have, in units of the scale squared.
        """
        most = _variance(_used(features), shape.apart)
        self.covariance += min(variance / most, 1.0) * shape.apart

    def age(self, shape: Shape, own: float, level: float) -> None:
        """Grow uncertain.

        Args:
            shape: What is believed when nothing is remembered.
            own: Fraction of the memory that is lost, 0..1.
            level: Variance by which everything may have become slower or faster
                together, as a fraction of the times squared.
        """
        self.covariance += own * (shape.covariance - self.covariance)
        self.covariance += level * np.outer(self.mean, self.mean)
