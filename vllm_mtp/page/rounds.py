"""Rounds of recent requests: what was drafted, and what verification made of it.

A *round* is one step in which the target gave a request tokens. The scheduler notes
them; they travel to the front end as changes, plain lists and dictionaries, and are
put together there::

    {"number": 7, "name": "cmpl-..", "prompt": [ids], "num_prompt_tokens": 12,
     "rounds": [[[draft ids], accepted, next id, committed], ..],
     "num_left_out": 0, "has_ended": false}

``prompt`` and what belongs to it are in the first change of a request alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

UNKNOWN_TOKEN = -1
"""A draft token whose id did not reach the scheduler."""

MAX_ROUNDS = 512
"""Of a request that are kept; of a longer one the first."""
MAX_PROMPT_TOKENS = 256
"""Of a prompt that are kept, the last ones."""


class Round(NamedTuple):
    """One step of one request."""

    draft: Sequence[int]
    """Token ids that the target verified, K of them; empty without a draft."""
    num_accepted: int
    next_token: int
    """After the accepted ones: the recovered token, the bonus token if all of a draft
    were accepted, or what the target says without a draft."""
    num_committed: int
    """Of accepted ones and that token: those up to the request's end."""


class RoundSums(NamedTuple):
    """Of a request's rounds, counted as its response counts them."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_committed_tokens: int


@dataclass
class RequestRounds:
    """A request and its rounds so far."""

    number: int
    """Unique within an engine; later requests have greater ones."""
    name: str
    prompt: Sequence[int]
    num_prompt_tokens: int
    rounds: list[Round] = field(default_factory=list)
    num_left_out: int = 0
    """Rounds beyond `MAX_ROUNDS`."""
    has_ended: bool = False

    @property
    def sums(self) -> RoundSums:
        """Of the rounds that are kept."""
        return RoundSums(
            sum(bool(each.draft) for each in self.rounds),
            sum(len(each.draft) for each in self.rounds),
            sum(each.num_accepted for each in self.rounds),
            sum(each.num_committed for each in self.rounds),
        )

    def apply(self, change: Mapping[str, Any]) -> None:
        """Add what a change says."""
        self.rounds += [Round(*each) for each in change["rounds"]]
        self.num_left_out = change["num_left_out"]
        self.has_ended = change["has_ended"]


class RecentRequests:
    """The last requests whose rounds were noted, of all engines of a front end."""

    def __init__(self, max_requests: int) -> None:
        """Keep none yet.

        Args:
            max_requests: To keep; the oldest makes room.
        """
        self.max_requests = max_requests
        self._requests: dict[tuple[int, int], RequestRounds] = {}

    def add(self, engine: int, changes: Sequence[Mapping[str, Any]]) -> None:
        """Take changes up.

        Args:
            engine: That they come from.
            changes: See the top of this file.
        """
        for change in changes:
            key = engine, change["number"]
            if "prompt" in change:
                self._requests[key] = RequestRounds(
                    change["number"],
                    change["name"],
                    change["prompt"],
                    change["num_prompt_tokens"],
                )
                if len(self._requests) > self.max_requests:
                    del self._requests[next(iter(self._requests))]
            request = self._requests.get(key)
            if request is not None:  # else it had to make room
                request.apply(change)

    def newest_first(self) -> dict[str, RequestRounds]:
        """By a key that is good for an address: engine and number."""
        # A copy: another thread may add.
        items = list(self._requests.items())
        return {f"{key[0]}-{key[1]}": each for key, each in reversed(items)}
