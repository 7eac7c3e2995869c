"""The likeliest token of each row, without what ``torch.argmax`` takes for it on a CPU.

There it looks at one value after another, while ``torch.amax`` uses the processor's
vectors. So the vocabulary is cut into blocks: the largest value of each, the first
block that has the largest of them, and the place in it. 32 rows of 131,072 float32
logits take 0.6 ms instead of 3.6 on one core of an EPYC.
"""

import torch

_BLOCK_TOKENS = (256, 128)
"""Vocabularies are multiples of the second one more often than of the first."""
_MIN_VOCAB_SIZE = 1 << 14
"""Below, three operations cost as much as they save."""


def likeliest_tokens(
    # [num_rows, vocab_size], of any floating-point type
    logits: torch.Tensor,
) -> torch.Tensor:
    """``[num_rows]`` int64: of equal values the first one, and NaN above all others."""
    vocab_size = logits.shape[1]
    if logits.device.type == "cpu" and vocab_size >= _MIN_VOCAB_SIZE:
        for size in _BLOCK_TOKENS:
            if vocab_size % size == 0:
                return _by_blocks(torch.unflatten(logits, 1, (-1, size)))
    return logits.argmax(dim=-1)


def _by_blocks(
    # [num_rows, num_blocks, block_tokens]
    logits: torch.Tensor,
) -> torch.Tensor:
    block = logits.amax(dim=-1).argmax(dim=-1)
    rows = torch.arange(len(logits))
    return block * logits.shape[2] + logits[rows, block].argmax(dim=-1)
