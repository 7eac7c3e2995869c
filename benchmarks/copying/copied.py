"""How much of an answer is a copy of what stood before it. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

MATCH_TOKENS = (4, 8)
"""A token counts as copied behind a match of so many tokens. vLLM's own copying needs
four."""


class Copied(NamedTuple):
    """Tokens of an answer that the longest match in their context foretells.

    Attributes:
        from_context: Of them, behind a match of each of `MATCH_TOKENS` or longer.
        from_prompt: The same where only the prompt is searched: a model that repeats
            its own answer for ever copies, too, but edits nothing.
        num_tokens: Of the answer.
    """

    from_context: tuple[int, ...]
    from_prompt: tuple[int, ...]
    num_tokens: int


def count_copied(prompt: Sequence[int], answer: Sequence[int]) -> Copied:
    """Count an answer's copied tokens.

    Args:
        prompt: Token ids.
        answer: Token ids.
    """
    whole = _counted(prompt, answer, len(prompt) + len(answer))
    return Copied(whole, _counted(prompt, answer, len(prompt)), len(answer))


def copied_share(counts: Sequence[Copied]) -> dict[str, dict[str, float]]:
    """Shares over all answers, by source and least length of the match."""
    total = sum(each.num_tokens for each in counts)
    return {
        source: {
            str(length): sum(getattr(each, source)[place] for each in counts) / total
            for place, length in enumerate(MATCH_TOKENS)
        }
        for source in ("from_context", "from_prompt")
    }


def _counted(
    prompt: Sequence[int], answer: Sequence[int], num_searched: int
) -> tuple[int, ...]:
    """Copied tokens, of sources that end within the first ``num_searched`` tokens."""
    context: list[int] = []
    matches: list[int] = [0]
    counts = [0] * len(MATCH_TOKENS)
    for place, token in enumerate((*prompt, *answer)):
        if place >= len(prompt):
            length, following = _longest(context, matches, num_searched)
            for which, least in enumerate(MATCH_TOKENS):
                counts[which] += length >= least and following == token
        # Of each place: how many tokens before it equal the last ones of the context.
        matches = [
            0,
            *(
                length + 1 if own == token else 0
                for length, own in zip(matches, context, strict=False)
            ),
            0,
        ]
        context.append(token)
    return tuple(counts)


def _longest(
    context: Sequence[int], matches: Sequence[int], num_searched: int
) -> tuple[int, int | None]:
    """Length of the longest match, the latest of equals, and the token behind it."""
    places = range(min(len(context), num_searched))
    if not places:
        return 0, None
    best = max(places, key=lambda place: (matches[place], place))
    return matches[best], context[best]
