"""What drafting is worth where each draft token's confidence decides about it.

Where the worker can look at its drafts (`stopping`), those that nobody is sure of are
not verified. A plan that verifies all drafts, or those of some requests, promises less
than that: for four requests whose text changed between easy and hard, verifying what
seemed good was worth 15 % where verifying all was worth nothing.

So every request is taken for several that are equally likely: its next draft as sure
as the surest quarter of the drafts seen lately, as the next quarter, and so on. In the
mean they accept what the request is believed to: nothing but the choice is gained.
"""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.control.previous.expected_times import ExpectedTimes
from benchmarks.control.previous.planner import Batch, Group, Plan
from benchmarks.control.previous.stopping import prices
from vllm_mtp.acceptance import log_odds, logistic

MAX_SPLIT = 16
"""Requests up to which this is reckoned; more differ enough among themselves."""
_NUM_DEPTHS = 2
"""Depths, the best, of which it is."""
_NUM_FITS = 4
_LEAST_CUT = 1e-6
"""So that the plan is not taken for a uniform one."""


def spread_around(probability: float, offsets: Sequence[float]) -> list[float]:
    """Equally likely probabilities with a given mean.

    Args:
        probability: The mean, 0 to 1.
        offsets: What sets them apart, log-odds, at least one.
    """
    centre = log_odds(probability) - sum(offsets) / len(offsets)
    for _ in range(_NUM_FITS):  # Newton's method
        spread = [logistic(centre + offset) for offset in offsets]
        slope = sum(p * (1.0 - p) for p in spread)
        missing = len(spread) * probability - sum(spread)
        centre += min(max(missing / max(slope, 1e-3), -2.0), 2.0)
    return [logistic(centre + offset) for offset in offsets]


class Part(NamedTuple):
    """Requests of a group whose next draft token is about equally sure."""

    num_requests: float
    # [K_max]
    survival: Sequence[float]


def split(group: Group) -> list[Part]:
    """A group by the confidence of the next draft token."""
    first = group.survival[0]
    if not group.offsets or not first:
        return [Part(group.num_requests, group.survival)]
    share = group.num_requests / len(group.offsets)
    return [
        Part(share, [p / first * survival for survival in group.survival])
        for p in spread_around(first, group.offsets)
    ]


def selective_plans(
    batch: Batch, found: Sequence[Plan], times: ExpectedTimes
) -> list[Plan]:
    """Plans that leave it to the worker whose drafts are verified.

    Args:
        batch: That the plans were found for.
        found: Uniform ones among them.
        times: Expected step times for it.

    Returns:
        Nothing where requests are pinned, or where nothing is known of confidences.
    """
    if batch.pinned or not any(group.offsets for group in batch.groups):
        return []
    uniform = [plan for plan in found if plan.depth and plan.is_uniform]
    best = sorted(uniform, key=lambda plan: plan.goodput)[-_NUM_DEPTHS:]
    verify = [prices(p, times, batch.num_requests, p.depth, 1.0).verify for p in best]
    return [
        selective_plan(batch.groups, plan, worth, times)
        for plan, worth in zip(best, verify, strict=True)
    ]


def selective_plan(
    groups: Sequence[Group],
    uniform: Plan,
    verify_prices: Sequence[float],
    times: ExpectedTimes,
) -> Plan:
    """What a plan is worth if a rule verifies only what is worth its price.

    Args:
        groups: All requests; none is pinned.
        uniform: Of the same depth, > 0, for the same requests.
        verify_prices: Of verifying 0, 1, .. draft tokens of one request, in tokens;
            at least so many as the plan is deep.
        times: Expected step times for the batch.
    """
    depth = uniform.depth
    parts = [part for group in groups for part in split(group)]
    lengths = [_worth_verifying(p.survival[:depth], verify_prices) for p in parts]
    counts = [part.num_requests for part in parts]
    num_requests = sum(counts)
    tokens = sum(
        n * (1.0 + sum(part.survival[:k]))
        for n, k, part in zip(counts, lengths, parts, strict=True)
    )
    if num_requests == 1:
        seconds = sum(
            n * times.uniform(k, depth).seconds
            for n, k in zip(counts, lengths, strict=True)
        )
    else:
        rows = sum(n * k for n, k in zip(counts, lengths, strict=True)) / num_requests
        seconds = _mixed_s(times, rows, depth)
    cut = max(verify_prices[1], _LEAST_CUT)
    lucky = uniform.optimistic_goodput * (tokens / seconds) / uniform.goodput
    return Plan(depth, cut, tokens, seconds, lucky, bold_s=seconds)


def _mixed_s(times: ExpectedTimes, rows: float, depth: int) -> float:
    """Time of steps that verify so many draft tokens per request in the mean.

    Some verify none and some as many for all, so it is a mean of those times, too.
    That of few rows alone, which is met seldom and believed to be anything, was 40 ms
    where no rows took 43 and one of each request 52, and drafting promised 10 % more
    than it kept.
    """
    fewer = min(int(rows), depth - 1)
    low, high = (times.mixed(k, depth).seconds for k in (fewer, fewer + 1))
    between = low + (rows - fewer) * (high - low)
    return max(times.mixed(rows, depth).seconds, between)


def _worth_verifying(survival: Sequence[float], prices: Sequence[float]) -> int:
    """Draft tokens whose acceptance is worth most beyond their price."""
    worths = [0.0]
    accepted = 0.0
    for probability, price in zip(survival, prices[1:], strict=False):
        accepted += probability
        worths.append(accepted - price)
    return max(range(len(worths)), key=worths.__getitem__)
