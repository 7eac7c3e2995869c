"""The requests of the three loads. Pure: texts and tokens in, prompts out."""

import random
import re
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from typing import NamedTuple

from vllm_mtp.config import ConfigError

EDITS, PROSE, NOISE = "edits", "prose", "noise"
LOADS = {
    EDITS: "a file, then its beginning again with an identifier renamed, to go on with",
    PROSE: "English prose, to go on with",
    NOISE: "random tokens, to go on with",
}
SEPARATOR = "\n\n# the same file with one change\n\n"
BEGUN_TOKENS = 32
"""Of the changed file, in the prompt."""
RENAMED = re.compile(r"\b[a-z_]{4,}\b")
SHORTEST_LEFT_TOKENS = 16
"""Of a changed file, to go on with."""


class Edit(NamedTuple):
    """A file before and after one change.

    Attributes:
        before: Its text.
        after: The same with one identifier renamed wherever it stands.
    """

    before: str
    after: str


def make_edits(
    texts: Sequence[str], count: int, characters: int, seed: int
) -> list[Edit]:
    """Join short texts to files and rename one identifier in each.

    Args:
        texts: Stretches of source code.
        count: Files.
        characters: Of a file, at least.
        seed: Decides which texts, in which order, and what is renamed to what.

    Raises:
        ConfigError: No text has an identifier.
    """
    rng = random.Random(seed)
    names = sorted({name for text in texts for name in RENAMED.findall(text)})
    if not names:
        raise ConfigError("prompts: no text has an identifier that could be renamed")
    order = rng.sample(texts, len(texts))
    source = cycle(order)
    edits: list[Edit] = []
    while len(edits) < count:
        before = ""
        while len(before) < characters:
            before += next(source)
        old = rng.choice(sorted(set(RENAMED.findall(before))) or names)
        new = rng.choice([name for name in names if name != old])
        edits.append(Edit(before, re.sub(rf"\b{old}\b", new, before)))
    return edits


def edit_prompt(
    before: Sequence[int],
    separator: Sequence[int],
    after: Sequence[int],
    file_tokens: int,
) -> list[int]:
    """A file, the separator, and the beginning of the changed file.

    Args:
        before: Token ids of the file.
        separator: Of the separator.
        after: Of the changed file.
        file_tokens: Where the file is cut.
    """
    return [*before[:file_tokens], *separator, *after[:BEGUN_TOKENS]]


def prose_prompts(token_ids: Sequence[int], count: int, length: int) -> list[list[int]]:
    """Windows of a text that begin at evenly spread places; it goes round."""
    stride = max(1, len(token_ids) // count)
    return [
        list(islice(cycle(token_ids), number * stride, number * stride + length))
        for number in range(count)
    ]


def noise_prompts(
    vocab_size: int, count: int, length: int, seed: int
) -> list[list[int]]:
    """Tokens drawn evenly from the vocabulary."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def as_wave(
    prompts: Sequence[Sequence[int]], request_tokens: int
) -> list[Mapping[str, object]]:
    """Greedy requests of a fixed length."""
    sampling = {"temperature": 0.0, "max_tokens": request_tokens}
    return [{"prompt": list(prompt), "sampling": dict(sampling)} for prompt in prompts]
