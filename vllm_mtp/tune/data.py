"""Batches of texts, in an order that a seed decides."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from vllm_mtp.tune.shards import Place, Texts
from vllm_mtp.tune.unroll import Batch


class Window(NamedTuple):
    """Part of a text that is trained on at once."""

    place: Place
    start: int
    num_tokens: int


class Batches:
    """Windows of texts in an order that a seed decides, epoch by epoch."""

    def __init__(
        self,
        texts: Texts,
        places: Sequence[Place],
        *,
        window_tokens: int,
        batch_tokens: int,
        min_tokens: int,
        seed: int,
    ) -> None:
        """
        Args:
            texts: To read from.
            places: The ones to take.
            window_tokens: Longer texts are cut.
            batch_tokens: Of a batch with its padding, at least one window.
            min_tokens: Shorter windows are left out.
            seed: Of the order.
        """
        self._texts, self._seed = texts, seed
        self._batch_tokens = batch_tokens
        self.windows = [
            Window(place, start, min(window_tokens, place.end - place.start - start))
            for place in places
            for start in range(0, place.end - place.start, window_tokens)
            if place.end - place.start - start >= min_tokens
        ]

    def of_epoch(self, epoch: int) -> list[list[Window]]:
        """Batches of an epoch. Windows of like lengths share one: little is padded."""
        order = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        shuffled = [
            self.windows[i] for i in torch.randperm(len(self.windows), generator=order)
        ]
        batches: list[list[Window]] = []
        for group in _grouped(shuffled, 64):
            group.sort(key=lambda window: window.num_tokens)
            batches += _filled(group, self._batch_tokens)
        return [batches[i] for i in torch.randperm(len(batches), generator=order)]

    def read(self, windows: Sequence[Window]) -> Batch:
        """A batch on the CPU."""
        texts = [self._texts.read(*window) for window in windows]
        lengths = torch.tensor([len(text.token_ids) for text in texts])
        longest = int(lengths.max())
        pad = torch.nn.utils.rnn.pad_sequence
        firsts = torch.tensor([text.first_position for text in texts])
        return Batch(
            pad([text.token_ids.long() for text in texts], batch_first=True),
            pad([text.hidden for text in texts], batch_first=True),
            firsts[:, None] + torch.arange(longest),
            lengths,
        )


def _grouped(windows: list[Window], size: int) -> Iterator[list[Window]]:
    for start in range(0, len(windows), size):
        yield windows[start : start + size]


def _filled(windows: Sequence[Window], batch_tokens: int) -> Iterator[list[Window]]:
    batch: list[Window] = []
    for window in windows:  # shortest first: the newest is the longest
        if batch and (len(batch) + 1) * window.num_tokens > batch_tokens:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch
