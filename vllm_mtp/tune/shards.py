"""Texts with the hidden states that the trunk handed to the MTP layers, on disk.

A shard is a safetensors file of many texts, one after another::

    token_ids         [num_tokens] int32
    hidden            [num_tokens, hidden_size], of the model's dtype
    ends              [num_texts] int64: where each text ends
    first_positions   [num_texts] int64: above 0 where the prefix cache had the rest

and, in its metadata, ``names``: a JSON list of request ids.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vllm_mtp.config import ConfigError

PATTERN = "shard-*.safetensors"


class Text(NamedTuple):
    """One request's prompt and answer."""

    name: str
    token_ids: torch.Tensor
    """``[seq]`` int32."""
    hidden: torch.Tensor
    """``[seq, hidden_size]``."""
    first_position: int = 0


def write_shard(folder: Path, number: int, texts: Sequence[Text]) -> Path:
    """Write a shard whole or not at all."""
    path = folder / f"shard-{number:06}.safetensors"
    unfinished = path.with_suffix(".unfinished")
    lengths = torch.tensor([len(text.token_ids) for text in texts])
    save_file(
        {
            "token_ids": torch.cat([text.token_ids.int() for text in texts]),
            "hidden": torch.cat([text.hidden for text in texts]).contiguous(),
            "ends": lengths.cumsum(0),
            "first_positions": torch.tensor([text.first_position for text in texts]),
        },
        unfinished,
        metadata={"names": json.dumps([text.name for text in texts])},
    )
    os.replace(unfinished, path)
    return path


def count_tokens(folder: Path, vocab_size: int) -> torch.Tensor:
    """``[vocab_size]`` int64: how often each token is in the texts."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for file in sorted(folder.rglob(PATTERN)):
        with safe_open(file, framework="pt") as shard:
            counts += shard.get_tensor("token_ids").bincount(minlength=vocab_size)
    return counts


class Place(NamedTuple):
    """Where a text is."""

    name: str
    file: Path
    start: int
    end: int
    first_position: int


class Texts:
    """All texts of a folder; hidden states are read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            ConfigError: There are none.
        """
        self.places: list[Place] = []
        for file in sorted(folder.rglob(PATTERN)):
            with safe_open(file, framework="pt") as shard:
                ends = shard.get_tensor("ends").tolist()
                firsts = shard.get_tensor("first_positions").tolist()
                names = json.loads(shard.metadata()["names"])
            starts = [0, *ends[:-1]]
            rows = zip(names, starts, ends, firsts, strict=True)
            self.places += [
                Place(name, file, start, end, first) for name, start, end, first in rows
            ]
        if not self.places:
            raise ConfigError(f"data: {str(folder)!r} has no {PATTERN}")

    def read(self, place: Place, start: int, num_tokens: int) -> Text:
        """Part of a text.

        Args:
            place: Of it.
            start: Its first token, from the beginning of the text.
            num_tokens: At most so many.
        """
        first = place.start + start
        rows = slice(first, min(place.end, first + num_tokens))
        with safe_open(place.file, framework="pt") as shard:
            return Text(
                place.name,
                shard.get_slice("token_ids")[rows],
                shard.get_slice("hidden")[rows],
                place.first_position + start,
            )
