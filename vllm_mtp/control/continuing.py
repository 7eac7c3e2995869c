"""Continues the drafts of a plan from contexts, as far as that pays.

What is copied needs no draft step, only rows. How likely it is right does not follow
from the draft's own acceptance: where a context agrees with a draft, both are. Tokens
of all requests whose contexts offer any are taken in order of falling survival, down to
a cut, as in a mixed plan.
"""

from collections.abc import Sequence
from itertools import accumulate

from vllm_mtp.control.planner import Group, Plan
from vllm_mtp.control.step_times import Times


def continued_plan(plan: Plan, groups: Sequence[Group], times: Times) -> Plan:
    """A plan, or the same one with copied tokens where that is worth more.

    Args:
        plan: For these groups.
        groups: All requests.
        times: Expected step times for the batch.
    """
    lengths = [
        plan.draft_length(g.survival) if g.pinned is None else g.pinned for g in groups
    ]
    marginals = sorted(
        (
            (survival, group.num_requests)
            for group, length in zip(groups, lengths, strict=True)
            for survival in group.continued(length)
        ),
        reverse=True,
    )
    if not marginals:
        return plan
    num_requests = sum(group.num_requests for group in groups)
    rows = sum(g.num_requests * k for g, k in zip(groups, lengths, strict=True))
    is_uniform = len(groups) == 1
    before_s = times.seconds(rows / num_requests, plan.depth, len(set(lengths)) == 1)
    best = plan
    more_rows = accumulate(number for _, number in marginals)
    more_tokens = accumulate(survival * number for survival, number in marginals)
    for (cut, _), extra, tokens in zip(marginals, more_rows, more_tokens, strict=True):
        after_s = times.seconds((rows + extra) / num_requests, plan.depth, is_uniform)
        found = plan._replace(
            tokens=plan.tokens + tokens,
            seconds=plan.seconds + after_s - before_s,
            copy_cut=cut,
        )
        if found.goodput > best.goodput:
            best = found
    return best
