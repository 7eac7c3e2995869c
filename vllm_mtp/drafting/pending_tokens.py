"""Pending tokens: those that the MTP layers have not read, drafting being disabled.

While drafting is disabled the MTP layers do not run, so their KV cache falls behind the
target's. What they would have read (each token's position, the token after it, the
target's hidden state) is put here instead, one row for every request and step; when
drafting resumes one pass over these rows writes the missing KV: the KV backfill.

Memory is bounded and taken once. It is a ring, which the steps fill in their order::

    step 7           step 8           step 9
    | a | b | c |    | a | b | c |    | a | c | d |         <- owners
    0   1   2        3   4   5        6   7   8             <- row
                                                   ^ head

Rows are handed out by request, oldest first: ``a: 0 3 6, c: 2 5 7, d: 8``. Where the
ring is full the oldest go first, a few in a step.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Rows = npt.NDArray[np.int64]

ROWS_WORKED_OFF = 64
"""At once, at least, where the ring is full: one pass of the MTP layers."""
_NOBODY = -1


class BackfillPass(NamedTuple):
    """Rows of some requests for one pass, those of one request together."""

    # [num_requests]: indices into the batch, rising
    requests: Rows
    # [num_requests + 1] int32: rows of request i are query_start_loc[i : i + 2]
    query_start_loc: npt.NDArray[np.int32]
    # [num_rows] int64
    positions: torch.Tensor
    # [num_rows] int32: the token *after* each position, if it was given
    next_token_ids: torch.Tensor
    # [num_rows, hidden_size]
    hidden_states: torch.Tensor

    def request_of_row(self) -> Rows:
        """``[num_rows]``: the index into the batch of each row's request."""
        return np.repeat(self.requests, np.diff(self.query_start_loc))

    @property
    def num_rows(self) -> int:
        return int(self.query_start_loc[-1])

    @property
    def max_query_len(self) -> int:
        return int(np.diff(self.query_start_loc).max())

    def last_rows(self) -> torch.Tensor:
        """``[num_requests]`` int64: the last row of each request."""
        last = self.query_start_loc[1:].astype(np.int64) - 1
        return to_device(last, self.positions.device)


class PendingRows(NamedTuple):
    """All rows of some requests, those of one request together, oldest first."""

    # [num_requests]: rows of each; 0 where nothing is pending
    num_tokens: Rows
    # as in BackfillPass
    positions: torch.Tensor
    next_token_ids: torch.Tensor
    hidden_states: torch.Tensor

    def passes(self, max_rows: int) -> Iterator[BackfillPass]:
        """Divide into passes of at most ``max_rows`` rows, in order."""
        ends = self.num_tokens.cumsum()
        starts = ends - self.num_tokens
        for first in range(0, int(ends[-1]), max_rows):
            last = min(first + max_rows, int(ends[-1]))
            part = np.minimum(ends, last) - np.maximum(starts, first)
            requests = np.flatnonzero(part > 0)
            query_start_loc = np.zeros(len(requests) + 1, dtype=np.int32)
            np.cumsum(part[requests], out=query_start_loc[1:])
            yield BackfillPass(
                requests,
                query_start_loc,
                self.positions[first:last],
                self.next_token_ids[first:last],
                self.hidden_states[first:last],
            )


class PendingTokens:
    """A bounded store of rows."""

    def __init__(
        self,
        max_rows: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Take the memory.

        Args:
            max_rows: Most rows kept.
            hidden_size: Of the hidden states that the MTP layers read.
            dtype: Of the hidden states.
            device: The worker's.
        """
        self.max_rows = max_rows
        self.num_rows = 0
        self.hidden_states = torch.empty(
            max_rows, hidden_size, dtype=dtype, device=device
        )
        self.positions = torch.empty(max_rows, dtype=torch.int64, device=device)
        self._next_token_ids = torch.empty(max_rows, dtype=torch.int32, device=device)
        self._owners: Rows = np.full(max_rows, _NOBODY, dtype=np.int64)
        self._head = 0
        """The next row to be written."""
        self._end = 0
        """No row from here on has been written since there was none."""
        self._numbers: dict[str, int] = {}
        """An integer for each request that has rows."""
        self._next_number = 0
        self._last_ids: list[str] = []
        self._last_numbers: Rows = np.empty(0, dtype=np.int64)

    def make_room(
        self,
        num_rows: int,
        live_request_ids: Collection[str],
        backfill: Callable[[Rows], None],
    ) -> None:
        """See that the next rows are free.

        Args:
            num_rows: About to be reserved.
            live_request_ids: Rows of all others go first.
            backfill: Runs the MTP layers over some rows, as far as their requests are
                in this step, and takes them.
        """
        if self._are_free(self._next(num_rows)):
            return
        self.keep_only(live_request_ids)
        first = self._next(num_rows).start
        last = min(first + max(num_rows, ROWS_WORKED_OFF), self.max_rows)
        # In the order of steps, so those that are passed over come first.
        passed_over = np.arange(self._head, self.max_rows if first == 0 else self._head)
        rows = np.concatenate([passed_over, np.arange(first, last)])
        if not self._are_free(rows):
            backfill(rows)
        # Requests that wait to be scheduled: fewer of their drafts will be accepted,
        # but memory stays bounded.
        self._free(rows[self._owners[rows] != _NOBODY])

    def reserve(self, request_ids: Sequence[str]) -> slice:
        """A row for each request, to be written; there must be room."""
        rows = self._next(len(request_ids))
        assert self._are_free(rows), (rows, self.max_rows)
        self._owners[rows] = self._numbers_of(request_ids)
        self._head, self._end = rows.stop, max(self._end, rows.stop)
        self.num_rows += len(request_ids)
        return rows

    def add(
        self,
        request_ids: Sequence[str],
        # [num_requests], any integers
        positions: torch.Tensor,
        # [num_requests], any integers
        next_token_ids: torch.Tensor,
        # [num_requests, hidden_size]
        hidden_states: torch.Tensor,
    ) -> None:
        """Keep one row of every request. There must be room."""
        rows = self.reserve(request_ids)
        self.positions[rows] = positions
        self._next_token_ids[rows] = next_token_ids
        self.hidden_states[rows] = hidden_states

    def forget(self, request_ids: Collection[str]) -> None:
        """Drop the rows of some requests."""
        if self._numbers.keys().isdisjoint(request_ids):
            return
        gone = [self._numbers.pop(i) for i in request_ids if i in self._numbers]
        self._last_ids = []
        self._free(np.flatnonzero(np.isin(self._owners[: self._end], gone)))

    def keep_only(self, request_ids: Collection[str]) -> None:
        """Drop the rows of all other requests."""
        self.forget(self._numbers.keys() - set(request_ids))

    def counts(self, request_ids: Sequence[str]) -> dict[str, int]:
        """Rows of each request, 0 for none."""
        owners = self._owners[: self._end]
        rows = np.bincount(owners[owners != _NOBODY], minlength=self._next_number + 1)
        numbers = self._numbers
        return {i: int(rows[numbers[i]]) if i in numbers else 0 for i in request_ids}

    def take(
        self,
        request_ids: Sequence[str],
        chosen: Collection[str] | None = None,
        within: Rows | None = None,
    ) -> PendingRows | None:
        """Hand out rows and free them; None if there are none.

        Args:
            request_ids: The batch, in its order.
            chosen: Those of them whose rows are handed out; None for all.
            within: Rows that are handed out; None for all.

        Returns:
            Copies: rows that are added later do not show in them.
        """
        picked = set(request_ids if chosen is None else chosen)
        # By number; the last place is nobody's.
        places = np.full(self._next_number + 1, _NOBODY, dtype=np.int64)
        for place, request_id in enumerate(request_ids):
            if request_id in picked and request_id in self._numbers:
                places[self._numbers[request_id]] = place
        place_of_row = places[self._owners[: self._end]]
        is_taken = place_of_row != _NOBODY
        if within is not None:
            is_taken &= np.isin(np.arange(self._end), within)
        rows = np.flatnonzero(is_taken)
        if not len(rows):
            return None
        oldest_first = np.roll(rows, -int(np.searchsorted(rows, self._head)))
        order = np.argsort(place_of_row[oldest_first], kind="stable")
        index = to_device(oldest_first[order], self.positions.device)
        taken = PendingRows(
            np.bincount(place_of_row[rows], minlength=len(request_ids)),
            self.positions[index],
            self._next_token_ids[index],
            self.hidden_states[index],
        )
        self._free(rows)
        return taken

    def _next(self, num_rows: int) -> slice:
        """The rows that come next; those of a step are not torn."""
        first = self._head if self._head + num_rows <= self.max_rows else 0
        return slice(first, first + num_rows)

    def _are_free(self, rows: slice | Rows) -> bool:
        return bool((self._owners[rows] == _NOBODY).all())

    def _free(self, rows: Rows) -> None:
        self._owners[rows] = _NOBODY
        self.num_rows -= len(rows)
        if not self.num_rows:
            self._numbers.clear()
            self._last_ids = []
            self._head = self._end = self._next_number = 0

    def _numbers_of(self, request_ids: Sequence[str]) -> Rows:
        # From step to step a batch seldom changes.
        if request_ids != self._last_ids:
            for request_id in request_ids:
                if request_id not in self._numbers:
                    self._numbers[request_id] = self._next_number
                    self._next_number += 1
            self._last_ids = list(request_ids)
            self._last_numbers = np.fromiter(
                map(self._numbers.__getitem__, request_ids), dtype=np.int64
            )
        return self._last_numbers


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy that nobody waits for."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
