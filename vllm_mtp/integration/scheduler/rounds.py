"""Notes the rounds of some requests for people to look at (``show_rounds``).

A few requests at a time, so that a step of a large batch pays for a few; and a step
only keeps what it has at hand, which is made rounds of several steps later: code that
has just run runs faster than after a pass of the target. Draft token ids are the
scheduler's where drafts come back to it; else the worker copies them to the host beside
the sampled tokens (`DraftedTokens`), for which nobody waits.
"""

import re
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm_mtp.integration.scheduler.messages import WorkerReport
from vllm_mtp.page.rounds import MAX_PROMPT_TOKENS, MAX_ROUNDS, Round
from vllm_mtp.request_options import is_recorded

MAX_AT_ONCE = 4
"""Requests that are noted at a time."""
_STEPS_AT_ONCE = 16

_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
"""vLLM makes names of requests unique."""


class _Noted:
    """A request under way."""

    def __init__(self, number: int, request: Any) -> None:
        self.number, self.request = number, request
        self.rounds: list[Round] = []
        self.num_rounds = self.num_left_out = 0
        self.is_announced = self.has_ended = False

    def add(self, found: Round) -> None:
        """Its next round."""
        if self.num_rounds < MAX_ROUNDS:
            self.rounds.append(found)
            self.num_rounds += 1
        else:
            self.num_left_out += 1

    def take(self) -> dict[str, Any]:
        """What is new of it."""
        rounds, self.rounds = self.rounds, []
        change = {
            "number": self.number,
            "rounds": [tuple(each) for each in rounds],
            "num_left_out": self.num_left_out,
            "has_ended": self.has_ended,
        }
        if not self.is_announced:
            self.is_announced = True
            prompt = self.request.prompt_token_ids or ()
            change |= {
                "name": _SUFFIX.sub("", self.request.request_id),
                "prompt": list(prompt[-MAX_PROMPT_TOKENS:]),
                "num_prompt_tokens": self.request.num_prompt_tokens,
            }
        return change


class _Verified(NamedTuple):
    """What a step has at hand of a request."""

    noted: _Noted
    num_tokens_before: int
    """Of its output."""
    token_ids: list[int]
    """Sampled."""
    draft: Sequence[int]
    """Scheduled; ids or placeholders."""
    place: int
    """In the step's output."""
    num_forbidden: int
    report: WorkerReport

    def round(self, num_committed: int) -> Round:
        """What became of it."""
        number = len(self.draft) - self.num_forbidden
        choice = self.report.choices.get(self.noted.request.request_id)
        if choice is not None:
            number = min(number, choice.num_verified)
        if self.report.drafted is None:
            draft = list(self.draft[:number])
        else:
            draft = self.report.drafted.of(self.place, number)
        num_accepted = len(self.token_ids) - 1
        return Round(draft, num_accepted, int(self.token_ids[-1]), num_committed)


class RoundNotes:
    """Of one scheduler."""

    def __init__(self, max_requests: int) -> None:
        """Nothing is noted.

        Args:
            max_requests: That the front end keeps.
        """
        self._noted: dict[str, _Noted] = {}
        self._ended: deque[_Noted] = deque(maxlen=max_requests)
        self._num_requests = 0
        self._verified: list[Any] = []
        """Fields of `_Verified`, of the last steps; not made rounds of yet."""

    def begin(self, request: Any) -> None:
        """Note this request, if it does not refuse and few others are.

        Args:
            request: vLLM's, before its first step.
        """
        params = request.sampling_params
        if (
            len(self._noted) < MAX_AT_ONCE
            and params is not None
            and is_recorded(params.extra_args)
        ):
            self._noted[request.request_id] = _Noted(self._num_requests, request)
            self._num_requests += 1

    def verified(
        self, scheduler_output: Any, output: Any, report: WorkerReport
    ) -> None:
        """A step's output is here; vLLM has not taken it up and shortened it yet."""
        sampled = output.sampled_token_ids
        if not self._noted or not sampled:
            return
        if len(self._verified) >= _STEPS_AT_ONCE * len(self._noted):
            self._make_rounds()
        drafts = scheduler_output.scheduled_spec_decode_tokens
        forbidden = scheduler_output.num_invalid_spec_tokens
        for request_id, noted in self._noted.items():
            place = output.req_id_to_index.get(request_id)
            if place is not None and sampled[place]:
                found = (
                    noted,
                    noted.request.num_output_tokens,
                    sampled[place].copy(),
                    drafts.get(request_id, ()),
                    place,
                    forbidden.get(request_id, 0) if forbidden else 0,
                    report,
                )
                self._verified.append(found)

    def _make_rounds(self, only: _Noted | None = None) -> None:
        """Of steps whose output vLLM has taken up: as far as it was, it counts.

        Args:
            only: One whose output it has taken up, where others' may be next.
        """
        waiting = list(map(_Verified._make, self._verified))
        self._verified = [e for e in waiting if only is not None and e.noted != only]
        rounds = []
        # From the last: a step has committed what there was of the output after it
        # and not before it.
        num_tokens: dict[int, int] = {}
        for each in reversed(waiting):
            if only is not None and each.noted != only:
                continue
            noted, before = each.noted, each.num_tokens_before
            after = num_tokens.get(noted.number, noted.request.num_output_tokens)
            num_tokens[noted.number] = before
            if after > before:
                rounds.append((noted, each.round(after - before)))
        for noted, found in reversed(rounds):
            noted.add(found)

    def end(self, request_id: str) -> None:
        """A request is gone, or will be another one."""
        noted = self._noted.pop(request_id, None)
        if noted is not None:
            self._make_rounds(noted)
            noted.has_ended = True
            self._ended.append(noted)

    def take(self) -> list[dict[str, Any]]:
        """Changes since the last ones (``page/rounds.py``)."""
        self._make_rounds()
        for request_id, noted in list(self._noted.items()):
            if noted.request.is_finished():
                self.end(request_id)
        new = [each for each in self._noted.values() if each.rounds]
        changed = sorted([*self._ended, *new], key=_number)
        changes = [each.take() for each in changed]
        self._ended.clear()
        return changes


def _number(noted: _Noted) -> int:
    return noted.number
