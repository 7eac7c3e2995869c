"""What drafting is worth where each draft token's confidence decides about it.

Where the worker sees its drafts (`stopping`), those that are unlikely to be accepted
are not verified, so a plan that verifies all of them promises too little. Every request
is taken for several that are equally likely: its next draft as sure as the surest
quarter of the drafts seen lately, as the next quarter, and so on.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

from vllm_mtp.acceptance import logistic
from vllm_mtp.control.planner import Group, Plan
from vllm_mtp.control.step_times import Times


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
        Part(share, [chance / first * s for s in group.survival])
        for chance in (logistic(group.first_log_odds + o) for o in group.offsets)
    ]


def selective_plan(
    groups: Sequence[Group], uniform: Plan, verify_prices: Sequence[float], times: Times
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
    pairs = list(zip(parts, lengths, strict=True))
    num_requests = sum(part.num_requests for part in parts)
    tokens = sum(p.num_requests * (1.0 + sum(p.survival[:k])) for p, k in pairs)
    if len(groups) == 1 and groups[0].num_requests == 1:
        seconds = sum(p.num_requests * times.seconds(float(k), depth) for p, k in pairs)
    else:
        rows = sum(p.num_requests * k for p, k in pairs) / num_requests
        seconds = times.seconds(rows, depth, is_uniform=False)
    # A cut of 0 would be a uniform plan.
    cut = max(verify_prices[1], sys.float_info.min)
    return Plan(depth, cut, tokens, seconds, 1.0)


def _worth_verifying(survival: Sequence[float], prices: Sequence[float]) -> int:
    """Draft tokens whose acceptance is worth most beyond their price."""
    worths = [0.0]
    accepted = 0.0
    for probability, price in zip(survival, prices[1:], strict=False):
        accepted += probability
        worths.append(accepted - price)
    return max(range(len(worths)), key=worths.__getitem__)
