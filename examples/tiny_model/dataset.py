"""From source files to training batches of token ids."""

import random
from collections.abc import Iterator, Sequence

import torch
from tokenizers import Tokenizer

from examples.tiny_model.corpus import SourceFile
from examples.tiny_model.tokenizer import END_OF_TEXT, TURN_END, TURN_START

# A served model is asked through the chat template, so a part of the corpus
# is cut into turns; without it the template's tokens would be untrained.
CHAT_SHARE = 0.12
_QUESTION_LINES = (2, 12)
_ANSWER_LINES = (8, 40)


def as_document(text: str) -> str:
    """Plain code, closed by the end-of-text token."""
    return text + END_OF_TEXT


def as_chat(text: str, rng: random.Random) -> str:
    """Code as a series of one-turn chats: some lines asked, the next answered."""
    lines = text.splitlines(keepends=True)
    turns: list[str] = []
    start = 0
    while start < len(lines):
        middle = start + rng.randint(*_QUESTION_LINES)
        end = middle + rng.randint(*_ANSWER_LINES)
        question = "".join(lines[start:middle]).rstrip("\n")
        answer = "".join(lines[middle:end]).rstrip("\n")
        turns.append(
            f"{TURN_START}user\n{question}{TURN_END}\n"
            f"{TURN_START}assistant\n{answer}{TURN_END}\n{END_OF_TEXT}"
        )
        start = end
    return "".join(turns)


def encode_files(
    files: Sequence[SourceFile], tokenizer: Tokenizer, *, seed: int
) -> torch.Tensor:
    """Encodes files into one stream, in an order drawn from `seed`.

    Returns:
        Token ids, int32 `[num_tokens]`.
    """
    rng = random.Random(seed)
    order = list(files)
    rng.shuffle(order)
    ids: list[int] = []
    for file in order:
        chat = rng.random() < CHAT_SHARE
        text = as_chat(file.text, rng) if chat else as_document(file.text)
        ids.extend(tokenizer.encode(text).ids)
    return torch.tensor(ids, dtype=torch.int32)


def iterate_batches(
    tokens: torch.Tensor,  # [num_tokens] int32
    *,
    batch_size: int,
    seq_len_tokens: int,
    seed: int,
) -> Iterator[torch.Tensor]:
    """Yields batches for ever; each epoch cuts the stream at a new offset.

    Every token is seen once an epoch. The offset moves so that a token does
    not keep the position it happened to have in the first epoch.

    Yields:
        Token ids, int64 `[batch_size, seq_len_tokens]`.

    Raises:
        ValueError: If the stream is too short for one batch.
    """
    generator = torch.Generator().manual_seed(seed)
    num_rows = tokens.numel() // seq_len_tokens - 1
    if num_rows < batch_size:
        raise ValueError(
            f"corpus: {tokens.numel()} tokens are too few for one batch of "
            f"{batch_size} sequences of {seq_len_tokens} tokens"
        )
    while True:
        offset = int(torch.randint(seq_len_tokens, (1,), generator=generator))
        rows = tokens[offset : offset + num_rows * seq_len_tokens]
        rows = rows.view(num_rows, seq_len_tokens)
        order = torch.randperm(num_rows, generator=generator)
        for start in range(0, num_rows - batch_size + 1, batch_size):
            yield rows[order[start : start + batch_size]].long()
