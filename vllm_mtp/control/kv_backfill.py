"""Which requests get a KV backfill when drafting resumes after it was disabled.

Scheduler, worker, controller and trace lab all ask, of the same counts.
"""

from collections.abc import Mapping, Sequence

MIN_BACKFILL_TOKENS = 32
BACKFILL_TOKENS_PER_REQUEST = 4
"""When drafting resumes a step catches up on so many tokens, and on a single request in
any case. They pass one layer where the step's own rows pass all."""


def _limit(num_requests: int) -> int:
    """Tokens that a step catches up on, unless those of a single request are more."""
    return max(MIN_BACKFILL_TOKENS, BACKFILL_TOKENS_PER_REQUEST * num_requests)


def backfilled_now(num_unseen: Mapping[str, int]) -> list[str]:
    """Which requests of a step that drafts are caught up before it drafts.

    All, if few tokens wait. Otherwise those with the fewest, so that a resume costs no
    step much and an exploration costs little; the others get no drafts yet.

    Args:
        num_unseen: Tokens that wait for each request of the step, 0 for none.
    """
    limit = _limit(len(num_unseen))
    chosen: list[str] = []
    total = 0
    for request_id in sorted(num_unseen, key=lambda i: (num_unseen[i], i)):
        if total and total + num_unseen[request_id] > limit:
            break
        total += num_unseen[request_id]
        chosen.append(request_id)
    return chosen


def most_caught_up_now(num_unseen: Sequence[int]) -> int:
    """Tokens of those requests at most, without looking who they are.

    Args:
        num_unseen: Tokens that wait for each request of the step, 0 for none.
    """
    limit = max(_limit(len(num_unseen)), min(filter(None, num_unseen), default=0))
    return min(sum(num_unseen), limit)
