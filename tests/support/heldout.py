"""Prompts of held-out Python, the same on every machine.

They are cut from standard-library files that the bundled checkpoint was not trained
on and are committed with it, so no test needs the corpus.
"""

import functools
import json

from examples.tiny_model import TINY_MODEL

BUNDLED_CHECKPOINT = TINY_MODEL


@functools.cache
def heldout_texts() -> tuple[str, ...]:
    """All held-out prompts as text."""
    lines = (BUNDLED_CHECKPOINT / "heldout_prompts.jsonl").read_text().splitlines()
    return tuple(json.loads(line)["text"] for line in lines)


@functools.cache
def heldout_prompts(count: int, max_tokens: int = 128) -> tuple[tuple[int, ...], ...]:
    """The first ``count`` prompts as token ids, mixed lengths up to ``max_tokens``."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(BUNDLED_CHECKPOINT / "tokenizer.json"))
    texts = heldout_texts()[:count]
    assert len(texts) == count, f"only {len(texts)} held-out prompts"
    return tuple(tuple(tokenizer.encode(text).ids[:max_tokens]) for text in texts)
