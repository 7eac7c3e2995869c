"""Prompts cut from held-out files, so that tests need no corpus."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from examples.tiny_model.corpus import SourceFile

PROMPTS_FILE = "heldout_prompts.jsonl"
"""In the checkpoint's folder."""
MIN_PROMPT_TOKENS = 30
MAX_PROMPT_TOKENS = 200
MAX_PROMPTS_PER_FILE = 4


class HeldOutPrompt(NamedTuple):
    """The beginning of a stretch of held-out code.

    Attributes:
        id: Unique within the file of prompts.
        file: Name of the held-out file it was cut from.
        text: Whole lines of code.
    """

    id: str
    file: str
    text: str


def _cut(
    lines: Sequence[str], start: int, num_tokens: int, tokenizer: Tokenizer
) -> str | None:
    """Whole lines from `start` on, about `num_tokens` long, or None."""
    text = ""
    for line in lines[start:]:
        if len(tokenizer.encode(text + line).ids) > num_tokens:
            break
        text += line
    text = text.rstrip("\n") + "\n"
    enough = len(tokenizer.encode(text).ids) >= MIN_PROMPT_TOKENS
    return text if enough else None


def cut_prompts(
    files: Sequence[SourceFile],
    tokenizer: Tokenizer,
    num_prompts: int,
    *,
    seed: int,
    max_per_file: int = MAX_PROMPTS_PER_FILE,
) -> list[HeldOutPrompt]:
    """Cuts prompts of mixed length, at most a few from each file.

    Args:
        files: Held-out files.
        tokenizer: Counts tokens.
        num_prompts: Prompts wanted.
        seed: Decides where each begins and how long it is.
        max_per_file: From one file.

    Raises:
        ValueError: If the files do not yield that many.
    """
    rng = random.Random(seed)
    prompts: list[HeldOutPrompt] = []
    for _ in range(max_per_file):
        for file in files:
            lines = file.text.splitlines(keepends=True)
            length = rng.randint(MIN_PROMPT_TOKENS + 10, MAX_PROMPT_TOKENS)
            text = _cut(lines, rng.randrange(len(lines)), length, tokenizer)
            if text is not None and all(text != prompt.text for prompt in prompts):
                name = f"heldout-{len(prompts):03d}"
                prompts.append(HeldOutPrompt(name, file.name, text))
            if len(prompts) == num_prompts:
                return prompts
    raise ValueError(
        f"num_prompts: {num_prompts} prompts wanted, but {len(files)} held-out "
        f"files yield {len(prompts)}"
    )


def write_prompts(prompts: Sequence[HeldOutPrompt], path: Path) -> None:
    """Writes one JSON object a line."""
    lines = [json.dumps(prompt._asdict()) + "\n" for prompt in prompts]
    path.write_text("".join(lines), encoding="utf-8")


def read_prompts(path: Path) -> list[HeldOutPrompt]:
    """Reads what `write_prompts` wrote.

    Raises:
        ValueError: If the file is missing.
    """
    if not path.is_file():
        raise ValueError(f"prompts: {path} is missing")
    lines = path.read_text(encoding="utf-8").splitlines()
    return [HeldOutPrompt(**json.loads(line)) for line in lines]
