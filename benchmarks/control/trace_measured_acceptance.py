"""The true acceptance of recorded requests, estimated from what was accepted.

For each request and place in its output the conditional acceptance of position j is::

    (accepted + kappa_j mean_j) / (tested + kappa_j)

`accepted` and `tested` are sums over the drafts of the same request, weighted by their
distance in tokens (a Gaussian kernel); a position was tested when all before it were
accepted. `mean_j` is that of all requests of the same regime (greedy or sampled, free
or constrained) at the time, again a kernel, over steps, as narrow as its number of
drafts allows. `kappa_j` says how much alike requests and places are: the method of
moments, from how far windows scatter beyond chance. The width of the kernel is the one
under which each draft is best predicted by the others.

What this smooths away, a replay does not have: changes within a few tokens, and the
abruptness of a change that hits all requests at once (it becomes as wide as the kernel
over steps). Positions that were never drafted are taken to be like the last one that
was; a request without drafts like the mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from benchmarks.control.trace_world import Array

KERNEL_WIDTHS_TOKENS = (16.0, 32.0, 64.0, 128.0, 512.0)
"""Standard deviations that are tried."""
KNOT_TOKENS = 8
"""Distance of the places at which acceptance is tabulated."""
MEAN_DRAFTS = 200.0
"""Drafts behind the mean at a time, as far as the run has so many."""
_PRIOR_DRAFTS = 20.0
"""Weight of a position's overall mean in that at a time, and of the position before it
in the overall mean."""
_MAX_TRIED = 300
"""Requests that the width of the kernel is chosen from."""
_MAX_KAPPA = 1e4
_POOLED_SCALE = 50.0
"""Weight of all positions in the ``kappa`` of each; a window of n drafts weighs about
``n (n - 1) / 5``."""


@dataclass
class RequestHistory:
    """What verification made of one request's drafts, in order."""

    is_greedy: bool
    first_step: int
    """Number of the outcome before which it appeared."""
    is_constrained: bool = False
    places: list[int] = field(default_factory=list)
    """Tokens since it appeared."""
    steps: list[int] = field(default_factory=list)
    """Numbers of the outcomes."""
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


class _Counts(NamedTuple):
    """Drafts as arrays: [num_drafts, K_max] of 0 and 1."""

    places: Array
    steps: Array
    tested: Array
    accepted: Array


def _counts(history: RequestHistory, max_draft_length: int) -> _Counts:
    positions = np.arange(max_draft_length)
    drafted = np.array(history.drafted, dtype=int)[:, None]
    accepted = np.array(history.accepted, dtype=int)[:, None]
    passed = (positions < accepted).astype(float)
    tested = ((positions <= accepted) & (positions < drafted)).astype(float)
    return _Counts(
        np.array(history.places, dtype=float),
        np.array(history.steps, dtype=int),
        tested,
        passed,
    )


def acceptance_tables(
    histories: Sequence[RequestHistory], num_steps: int, max_draft_length: int
) -> list[Array]:
    """Conditional acceptance along each request.

    Args:
        histories: Of all requests.
        num_steps: Outcomes of the recording.
        max_draft_length: K_max.

    Returns:
        For each request [num_knots, K_max]: a row for every `KNOT_TOKENS` tokens.
    """
    tables: list[Array] = [np.zeros(0)] * len(histories)
    regimes = [(h.is_greedy, h.is_constrained) for h in histories]
    for regime in sorted(set(regimes)):
        members = [i for i, of_it in enumerate(regimes) if of_it == regime]
        counts = [_counts(histories[i], max_draft_length) for i in members]
        means = _means(counts, num_steps, max_draft_length)
        width, kappa = _best_kernel(counts, means)
        for i, count in zip(members, counts, strict=True):
            first = min(histories[i].first_step, num_steps - 1)
            tables[i] = _table(count, means, width, kappa, first)
    return tables


def _means(counts: Sequence[_Counts], num_steps: int, max_draft_length: int) -> Array:
    """Mean acceptance at each step, [num_steps, K_max]."""
    tested = np.zeros((num_steps, max_draft_length))
    accepted = np.zeros((num_steps, max_draft_length))
    for count in counts:
        np.add.at(tested, count.steps, count.tested)
        np.add.at(accepted, count.steps, count.accepted)
    overall = _filled(accepted.sum(axis=0), tested.sum(axis=0))
    result = np.empty_like(tested)
    for j in range(max_draft_length):
        width = MEAN_DRAFTS * num_steps / max(tested[:, j].sum(), 1.0) / 3.5
        kernel = _gaussian(min(max(width, 2.0), num_steps / 4))
        near = _convolved(accepted[:, j], kernel) + _PRIOR_DRAFTS * overall[j]
        result[:, j] = near / (_convolved(tested[:, j], kernel) + _PRIOR_DRAFTS)
    return result


def _filled(accepted: Array, tested: Array) -> Array:
    """Shares; what was hardly ever tested is like the position before it."""
    shares = np.empty_like(tested)
    last = float(accepted[0] / max(tested[0], 1.0))
    for j, (good, n) in enumerate(zip(accepted, tested, strict=True)):
        last = (good + _PRIOR_DRAFTS * last) / (n + _PRIOR_DRAFTS)
        shares[j] = last
    return shares


def _gaussian(width: float) -> Array:
    reach = np.arange(-int(4 * width) - 1, int(4 * width) + 2)
    kernel: Array = np.exp(-0.5 * (reach / width) ** 2)
    return kernel


def _convolved(values: Array, kernel: Array) -> Array:
    """Weighted sum around each step; beyond both ends there is nothing."""
    half = len(kernel) // 2
    result: Array = np.convolve(values, kernel)[half : half + len(values)]
    return result


def _best_kernel(counts: Sequence[_Counts], means: Array) -> tuple[float, Array]:
    """Width and ``kappa`` that predict each draft best from the others."""
    with_drafts = [count for count in counts if len(count.steps) > 1]
    stride = -(-len(with_drafts) // _MAX_TRIED) or 1
    sample = with_drafts[::stride]
    best = (-np.inf, KERNEL_WIDTHS_TOKENS[-1], np.full(means.shape[1], _MAX_KAPPA))
    for width in KERNEL_WIDTHS_TOKENS:
        kappa = _kappa(with_drafts, means, width)
        score = sum(_held_out(count, means, width, kappa) for count in sample)
        if score > best[0]:
            best = (score, width, kappa)
    return best[1], best[2]


def _kappa(counts: Sequence[_Counts], means: Array, width: float) -> Array:
    """Strength of the mean, by how far windows scatter beyond chance."""
    beyond = np.zeros(means.shape[1])
    scale = np.zeros(means.shape[1])
    for count in counts:
        windows = (count.places // (2.5 * width)).astype(int)
        for window in np.unique(windows):
            here = windows == window
            tested = count.tested[here]
            mean = means[count.steps[here]]
            n = tested.sum(axis=0)
            variance = (tested * mean * (1 - mean)).sum(axis=0)
            surplus = count.accepted[here].sum(axis=0) - (tested * mean).sum(axis=0)
            beyond += surplus**2 - variance
            scale += np.maximum(n - 1, 0) * variance
    # A position with few drafts says little about itself: pooled with the others.
    pooled = beyond.sum() / max(scale.sum(), 1.0)
    likeness = (beyond + _POOLED_SCALE * pooled) / (scale + _POOLED_SCALE)
    likeness = np.clip(likeness, 1 / _MAX_KAPPA, 0.5)
    result: Array = 1 / likeness - 1
    return result


def _smoothed(
    count: _Counts, places: Array, mean: Array, width: float, kappa: Array,
    leave_out: bool = False,
) -> Array:  # fmt: skip
    """Acceptance at some places, [num_places, K_max]."""
    weights = np.exp(-0.5 * ((places[:, None] - count.places) / width) ** 2)
    if leave_out:
        np.fill_diagonal(weights, 0.0)
    result: Array = (weights @ count.accepted + kappa * mean) / (
        weights @ count.tested + kappa
    )
    return result


def _held_out(count: _Counts, means: Array, width: float, kappa: Array) -> float:
    """Log-likelihood of each draft given the request's others."""
    mean = means[count.steps]
    guess = _smoothed(count, count.places, mean, width, kappa, leave_out=True)
    guess = np.clip(guess, 1e-4, 1 - 1e-4)
    failed = count.tested - count.accepted
    log_likelihood = count.accepted * np.log(guess) + failed * np.log(1 - guess)
    return float(log_likelihood.sum())


def _table(
    count: _Counts, means: Array, width: float, kappa: Array, first_step: int
) -> Array:
    if not len(count.steps):
        return means[first_step : first_step + 1]
    knots = np.arange(0.0, count.places[-1] + KNOT_TOKENS, KNOT_TOKENS)
    steps = np.interp(knots, count.places, count.steps).astype(int)
    return _smoothed(count, knots, means[steps], width, kappa)
