"""Copies from a request's own tokens: what followed where its last ones stood before.

Agents repeat much of what they were given, changed here and there; there a copy is
right for dozens of tokens where the MTP layers are for a few. In other text a phrase
that comes back goes on differently. So a copy continues a draft of the MTP layers, from
a place where the very tokens of that draft stand: they say which way the text goes. It
takes the place of a draft only behind a long match. How often copies of either kind are
right is learned (`control`).

The search is NumPy's: a look at all tokens for the last one, then a few at those
places. vLLM's n-gram proposer finds the same, and compiles for a second in each
process; tests compare the two.
"""

from typing import Any, NamedTuple

import numpy as np

Tokens = np.ndarray[Any, np.dtype[np.int32]]

MIN_MATCH = 3
"""Tokens before a draft that must stand before its continuation, too, beside the draft
itself. Fewer recur by chance; more come later after each change of an edit."""
MIN_MATCH_ALONE = 8
"""The same where there is no draft to speak for the place: some words of prose, which
hardly recur unless somebody copies."""
MAX_MATCH = 16
"""Tokens, the draft's included, of which longer matches count as no better: of equals
the first in the context is taken, as in vLLM's n-gram proposer."""


def continuation(tokens: Tokens, num_draft_tokens: int, limit: int) -> Tokens:
    """What followed the longest earlier match of the last tokens.

    Args:
        tokens: ``[num_tokens]``, the request's and then its draft's.
        num_draft_tokens: Of the draft.
        limit: Most tokens to return.

    Returns:
        ``[limit or fewer]``; none where no match is long enough.
    """
    least = MIN_MATCH + num_draft_tokens if num_draft_tokens else MIN_MATCH_ALONE
    longest, last = max(MAX_MATCH, least), len(tokens) - 1
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    length = 1
    while length < longest and ends.size:
        earlier = ends[ends >= length]
        earlier = earlier[tokens[earlier - length] == tokens[last - length]]
        if not earlier.size:
            break
        ends, length = earlier, length + 1
    if not ends.size or length < least:
        return tokens[:0]
    return tokens[ends[0] + 1 : ends[0] + 1 + limit]


class Offer(NamedTuple):
    """What a context has offered after a draft."""

    # [number of tokens] each
    draft: Tokens
    continuation: Tokens

    def compared(self, committed: Tokens) -> tuple[int, int]:
        """Tokens that stood where others were committed, and how many were the same.

        The draft, if there is one, counts as one: that a context agrees with it tells
        much of it.

        Args:
            committed: ``[number of tokens]``, from the draft's first place on.
        """
        length = len(self.draft)
        first = int(length > 0)
        if (committed[:length] != self.draft[: len(committed)]).any():
            return 1, 0
        if len(committed) < length:
            return 0, 0
        came = committed[length : length + len(self.continuation)]
        same = self.continuation[: len(came)] == came
        if same.all():
            return first + len(came), first + len(came)
        matched = first + int(same.argmin())
        return matched + 1, matched
