"""Prompts whose continuations are known, so that options can be chosen to matter.

A stop string that never comes, a biased token that is never likely and a word that
would not have been said test nothing. Pure.
"""

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

NUM_PROMPTS = 48
ANSWER_TOKENS = 64
BLOCK_BORDERS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 128)
"""Lengths of prompts (tokens) beside which blocks of usual sizes begin."""


class KnownPrompt(NamedTuple):
    """A prompt, and what the target alone says to it.

    Attributes:
        text: The prompt as text, or None where only token ids make it.
        token_ids: The same as tokens.
        answer: Greedy continuation (tokens).
        answer_text: The same as text.
    """

    text: str | None
    token_ids: tuple[int, ...]
    answer: tuple[int, ...]
    answer_text: str


class Corpus(NamedTuple):
    """All that a generator knows of a model.

    Attributes:
        prompts: At least one.
        common: Tokens by how often they are said, the commonest first.
        vocab_size: Of the model.
        max_model_len: Of the engines (tokens).
        max_draft_length: Upper bound on K.
        refused: Fields that the engines refuse whatever they say; asked rarely.
    """

    prompts: tuple[KnownPrompt, ...]
    common: tuple[int, ...]
    vocab_size: int
    max_model_len: int
    max_draft_length: int
    refused: tuple[str, ...] = ()


class Opening(NamedTuple):
    """A prompt that is not answered yet; see `KnownPrompt`."""

    text: str | None
    token_ids: list[int]


def choose_openings(
    texts: Sequence[str],
    token_ids: Sequence[Sequence[int]],
    max_model_len: int,
    seed: int,
) -> list[Opening]:
    """Prompts of every length, some of which begin alike."""
    rng = Random(f"openings {seed}")
    stream = [token for ids in token_ids for token in ids]
    openings = []
    for text, ids in zip(texts, token_ids, strict=True):
        if 0 < len(ids) < max_model_len // 2:
            openings.append(Opening(text, list(ids)))
    rng.shuffle(openings)
    del openings[NUM_PROMPTS // 3 :]
    lengths = [n for n in BLOCK_BORDERS if n < max_model_len]
    lengths += [max_model_len - n for n in (1, 2, 5, 12, 40)]
    for length in lengths:
        start = rng.randrange(max(1, len(stream) - length))
        openings.append(Opening(None, stream[start : start + length]))
    while len(openings) < NUM_PROMPTS:
        ids = rng.choice(token_ids)
        if ids:
            length = rng.randint(1, min(len(ids), max_model_len // 2))
            openings.append(Opening(None, list(ids[:length])))
    return openings


def make_corpus(
    openings: Sequence[Opening],
    answers: Sequence[dict[str, Any]],
    vocab_size: int,
    max_model_len: int,
    max_draft_length: int,
) -> Corpus:
    """Put prompts and their answers together."""
    prompts = tuple(
        KnownPrompt(
            opening.text,
            tuple(opening.token_ids),
            tuple(answer["token_ids"]),
            answer["text"],
        )
        for opening, answer in zip(openings, answers, strict=True)
    )
    counts = Counter(token for prompt in prompts for token in prompt.answer)
    common = tuple(token for token, _ in counts.most_common())
    return Corpus(prompts, common, vocab_size, max_model_len, max_draft_length)
