"""Rounds as the page reads them: texts instead of token ids.

Data of a request, which the page gets from a server or finds embedded in itself::

    {"name": "cmpl-..", "has_ended": true, "num_prompt_tokens": 12, "num_left_out": 0,
     "sums": {"num_drafts": .., "num_draft_tokens": .., "num_accepted_tokens": ..,
              "num_committed_tokens": ..},
     "prompt": "..",
     "rounds": [{"draft": [".."], "num_accepted": 1, "next": "..",
                 "num_committed": 2}, ..]}
"""

from collections.abc import Callable, Sequence
from typing import Any

from vllm_mtp.page.rounds import RequestRounds

Decode = Callable[[Sequence[int]], str]

CONTEXT_TOKENS = 8
"""Decoded in front of a token: what it looks like may depend on those before it."""
UNKNOWN = "?"
"""For a token whose id is not known."""
INCOMPLETE = "\ufffd"
"""What bytes decode to that are no whole character yet."""


def described(request: RequestRounds) -> dict[str, Any]:
    """A request without its text."""
    return {
        "name": request.name,
        "has_ended": request.has_ended,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_left_out": request.num_left_out,
        "num_rounds": len(request.rounds),
        "sums": request.sums._asdict(),
    }


def with_texts(request: RequestRounds, decode: Decode) -> dict[str, Any]:
    """A request with all of its rounds.

    Args:
        request: May get more rounds meanwhile.
        decode: Token ids to text, special tokens included.
    """
    context = list(request.prompt)
    rounds = []
    for draft, num_accepted, next_token, num_committed in list(request.rounds):
        kept = [*draft[:num_accepted], next_token]
        before = context[-CONTEXT_TOKENS:]
        rounds.append(
            {
                "draft": pieces(decode, before, draft),
                "num_accepted": num_accepted,
                "next": pieces(decode, before, kept)[-1],
                "num_committed": num_committed,
            }
        )
        context += kept
    prompt = decode(list(request.prompt)) if request.prompt else ""
    return {**described(request), "prompt": prompt, "rounds": rounds}


def pieces(
    decode: Decode, context: Sequence[int], token_ids: Sequence[int]
) -> list[str]:
    """What each token adds to the text.

    A token that ends within a character adds "", the one that completes it the
    character.

    Args:
        decode: Token ids to text.
        context: Tokens before.
        token_ids: Of the pieces.
    """
    if min([*context, *token_ids], default=0) < 0:
        return [UNKNOWN] * len(token_ids)
    texts, known = [], list(context)
    # The first ones may be the end of a character whose beginning is no context.
    before = decode(known).strip(INCOMPLETE) if known else ""
    for token_id in token_ids:
        known.append(token_id)
        after = decode(known).strip(INCOMPLETE)
        texts.append(after[_num_common(before, after) :])
        before = after
    return texts


def _num_common(first: str, second: str) -> int:
    """Characters that two texts begin with alike."""
    pairs = enumerate(zip(first, second, strict=False))
    differ = (index for index, (a, b) in pairs if a != b)
    return next(differ, min(len(first), len(second)))
