"""Pending tokens: those that the MTP layers have not read, drafting being disabled.

While drafting is disabled the MTP layers do not run, so their KV cache falls behind the
target's. What they would have read (each token's position, the token after it, the
target's hidden state) is put here instead, one row for every request and step; when
drafting resumes one pass over these rows writes the missing KV: the KV backfill.

Memory is bounded and taken once. Rows are appended in the order of the steps::

    step 7           step 8           step 9
    | a | b | c |    | a | b | c |    | a | c | d |         <- owners
    0   1   2        3   4   5        6   7   8             <- row
                                                   ^ num_rows

and handed out by request, oldest first: ``a: 0 3 6, c: 2 5 7, d: 8``.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Rows = npt.NDArray[np.int64]


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
        ends = torch.from_numpy(self.query_start_loc[1:].astype(np.int64))
        return ends.to(self.positions.device) - 1


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
        self._hidden_states = torch.empty(
            max_rows, hidden_size, dtype=dtype, device=device
        )
        self._positions = torch.empty(max_rows, dtype=torch.int64, device=device)
        self._next_token_ids = torch.empty(max_rows, dtype=torch.int32, device=device)
        self._owners: Rows = np.empty(max_rows, dtype=np.int64)
        self._numbers: dict[str, int] = {}
        """An integer for each request that has rows."""
        self._next_number = 0
        self._last_ids: list[str] = []
        self._last_numbers: Rows = np.empty(0, dtype=np.int64)

    def make_room(
        self,
        num_rows: int,
        live_request_ids: Collection[str],
        backfill: Callable[[], None],
    ) -> None:
        """See that ``num_rows`` fit.

        Args:
            num_rows: About to be added.
            live_request_ids: Rows of all others go first.
            backfill: Runs the MTP layers over the rows of this step's requests and
                takes them; called if those that live fill more than half.
        """
        if self.num_rows + num_rows <= self.max_rows:
            return
        self.keep_only(live_request_ids)
        if self.num_rows > self.max_rows // 2:
            backfill()
        if self.num_rows + num_rows > self.max_rows:
            # Requests that wait to be scheduled: fewer of their drafts will be
            # accepted, but memory stays bounded.
            self.keep_only(())

    def add(
        self,
        request_ids: Sequence[str],
        # [num_requests], any integers
        positions: torch.Tensor,
        # [num_requests], any integers; None if the backfill has them from elsewhere
        next_token_ids: torch.Tensor | None,
        # [num_requests, hidden_size]
        hidden_states: torch.Tensor,
    ) -> None:
        """Keep one row of every request. There must be room."""
        first, last = self.num_rows, self.num_rows + len(request_ids)
        assert last <= self.max_rows, (last, self.max_rows)
        self._positions[first:last] = positions
        if next_token_ids is not None:
            self._next_token_ids[first:last] = next_token_ids
        self._hidden_states[first:last] = hidden_states
        self._owners[first:last] = self._numbers_of(request_ids)
        self.num_rows = last

    def forget(self, request_ids: Collection[str]) -> None:
        """Drop the rows of some requests."""
        if self._numbers.keys().isdisjoint(request_ids):
            return
        gone = [self._numbers.pop(i) for i in request_ids if i in self._numbers]
        self._last_ids = []
        self._keep(np.isin(self._owners[: self.num_rows], gone, invert=True))

    def keep_only(self, request_ids: Collection[str]) -> None:
        """Drop the rows of all other requests."""
        self.forget(self._numbers.keys() - set(request_ids))

    def counts(self, request_ids: Sequence[str]) -> dict[str, int]:
        """Rows of each request, 0 for none."""
        rows = np.bincount(self._owners[: self.num_rows], minlength=1)
        numbers = self._numbers
        return {i: int(rows[numbers[i]]) if i in numbers else 0 for i in request_ids}

    def take(
        self, request_ids: Sequence[str], chosen: Collection[str] | None = None
    ) -> PendingRows | None:
        """Hand out rows and forget them; None if there are none.

        Args:
            request_ids: The batch, in its order.
            chosen: Those of them whose rows are handed out; None for all.

        Returns:
            Copies: rows that are added later do not show in them.
        """
        if chosen is None:
            chosen = request_ids
        picked = set(chosen)
        numbers = [self._numbers.get(i, -1) if i in picked else -1 for i in request_ids]
        if max(numbers, default=-1) < 0:
            return None
        place = np.full(self._next_number, -1, dtype=np.int64)
        for request, number in enumerate(numbers):
            if number >= 0:
                place[number] = request
        places = place[self._owners[: self.num_rows]]
        rows = np.flatnonzero(places >= 0)
        rows = rows[np.argsort(places[rows], kind="stable")]
        index = torch.from_numpy(rows).to(self._positions.device)
        taken = PendingRows(
            np.bincount(places[rows], minlength=len(request_ids)),
            self._positions[index],
            self._next_token_ids[index],
            self._hidden_states[index],
        )
        self.forget(picked)
        return taken

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

    def _keep(self, mask: npt.NDArray[np.bool_]) -> None:
        rows = np.flatnonzero(mask)
        if len(rows) < self.num_rows and len(rows):
            index = torch.from_numpy(rows).to(self._positions.device)
            self._positions[: len(rows)] = self._positions[index]
            self._next_token_ids[: len(rows)] = self._next_token_ids[index]
            self._hidden_states[: len(rows)] = self._hidden_states[index]
            self._owners[: len(rows)] = self._owners[rows]
        self.num_rows = len(rows)
        if not self.num_rows:
            self._numbers.clear()
            self._next_number = 0
