"""How many tokens of each request the MTP layers have not read; the worker has them."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from vllm_mtp.control.kv_backfill import backfilled_now


class Backfill(NamedTuple):
    """What the MTP layers read in a step before they draft."""

    num_tokens: int
    still_waiting: frozenset[str]
    """Requests that cannot be drafted for yet."""


class PendingCounts:
    """Counts of pending tokens, as the worker's store has them."""

    def __init__(self) -> None:
        self._num_steps = 0
        """Without the MTP layers so far."""
        self._read_until: dict[str, int] = {}
        """By request: that count when nothing was pending."""

    @property
    def has_any(self) -> bool:
        return bool(self._read_until)

    def of(self, request_id: str) -> int:
        """Pending tokens of a request."""
        if not self._read_until:
            return 0
        return self._num_steps - self._read_until.get(request_id, self._num_steps)

    def add(self, request_ids: Iterable[str], num_steps: int = 1) -> None:
        """Steps without the MTP layers: each leaves a token of each request pending."""
        for request_id in request_ids:
            self._read_until.setdefault(request_id, self._num_steps)
        self._num_steps += num_steps

    def backfill(self, request_ids: Collection[str]) -> Backfill:
        """A step that drafts: the KV of some of its requests is filled in before."""
        if not self._read_until:
            return Backfill(0, frozenset())
        pending = {i: self.of(i) for i in request_ids}
        chosen = backfilled_now(pending)
        for request_id in chosen:
            self._read_until.pop(request_id, None)
        return Backfill(
            sum(pending[i] for i in chosen),
            frozenset(i for i in request_ids if i in self._read_until),
        )

    def forget(self, request_id: str) -> None:
        self._read_until.pop(request_id, None)
