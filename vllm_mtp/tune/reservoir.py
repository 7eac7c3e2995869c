"""Texts of the traffic that a head is adapted to: bounded, and in memory.

A folder of a file system in memory, shared by two processes::

    inbox/shard-*.safetensors   the server's, which stops where they are many
    kept/shard-*.safetensors    the trainer's: one for each time that it looked

The newest quarter of what is kept stays; of the older ones a random one goes for each
that comes, so what was served long ago becomes rarer and is not forgotten at once.
"""

import random
from collections.abc import Collection
from pathlib import Path

import torch

from vllm_mtp.tune.shards import PATTERN, Place, Text, Texts, write_shard

INBOX, KEPT = "inbox", "kept"
INBOX_SHARE = 4
"""A quarter of all memory is the inbox."""
_MAX_SHARDS = 256
_FRESH_SHARE = 4
"""A quarter of the shards that are kept never has to go."""


class Reservoir:
    """The trainer's side."""

    def __init__(self, folder: Path, max_bytes: int, min_tokens: int) -> None:
        """
        Args:
            folder: With or without texts of a trainer before this one.
            max_bytes: Of both folders.
            min_tokens: Shorter texts are thrown away.
        """
        self._inbox, self.kept = folder / INBOX, folder / KEPT
        for each in (self._inbox, self.kept):
            each.mkdir(parents=True, exist_ok=True)
        self._max_bytes = max_bytes - max_bytes // INBOX_SHARE
        self._min_tokens = min_tokens
        names = (int(path.stem.partition("-")[2]) for path in self._files())
        self._next = max(names, default=-1) + 1
        self._random = random.Random(0)

    def num_waiting(self) -> int:
        """Texts in the inbox."""
        return len(self._waiting().places) if self._has_waiting() else 0

    def take(self) -> list[Place]:
        """Keep what is in the inbox; where it is now."""
        if not self._has_waiting():
            return []
        files = sorted(self._inbox.glob(PATTERN))
        waiting = self._waiting()
        texts = [waiting.read(place, 0, place.end) for place in waiting.places]
        texts = [text for text in texts if self._is_of_use(text)]
        if texts:
            made = write_shard(self.kept, self._next, texts)
            self._next += 1
        for file in files:
            file.unlink()
        self._evict()
        return [p for p in self.texts().places if p.file == made] if texts else []

    def texts(self) -> Texts:
        """All that are kept."""
        return Texts(self.kept)

    def _has_waiting(self) -> bool:
        return any(self._inbox.glob(PATTERN))

    def _waiting(self) -> Texts:
        return Texts(self._inbox)

    def _is_of_use(self, text: Text) -> bool:
        is_long_enough = len(text.token_ids) >= self._min_tokens
        return is_long_enough and bool(torch.isfinite(text.hidden).all())

    def _files(self) -> list[Path]:
        return sorted(self.kept.glob(PATTERN))

    def _evict(self) -> None:
        files = self._files()
        while len(files) > 1 and self._are_too_many(files):
            num_old = max(1, len(files) - len(files) // _FRESH_SHARE - 1)
            files.pop(self._random.randrange(num_old)).unlink()

    def _are_too_many(self, files: Collection[Path]) -> bool:
        num_bytes = sum(file.stat().st_size for file in files)
        return num_bytes > self._max_bytes or len(files) > _MAX_SHARDS


def num_waiting_bytes(folder: Path) -> int:
    """Of the inbox: what the trainer has not looked at. The server's side."""
    return sum(file.stat().st_size for file in (folder / INBOX).glob(PATTERN))
