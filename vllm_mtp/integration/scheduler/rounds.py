"""Notes the rounds of some requests for people to look at (``show_rounds``).

A few requests at a time, so that a step of a large batch pays for a few. Draft token
ids are the scheduler's where drafts come back to it; else the worker copies them to the
host beside the sampled tokens (`DraftedTokens`), for which nobody waits.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_mtp.integration.scheduler.messages import WorkerReport
from vllm_mtp.page.rounds import MAX_PROMPT_TOKENS, MAX_ROUNDS, Round
from vllm_mtp.request_options import is_recorded

MAX_AT_ONCE = 4
"""Requests that are noted at a time: a round takes about a microsecond, and a step of a
large batch on a fast GPU 5 ms."""

_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
"""vLLM makes names of requests unique."""


class _Noted:
    """A request under way."""

    def __init__(self, number: int, request: Any) -> None:
        self.number, self.request = number, request
        self.num_tokens = request.num_output_tokens
        self.rounds: list[Round] = []
        self.num_rounds = self.num_left_out = 0
        self.is_announced = self.has_ended = False

    def add(self, found: Round) -> None:
        """A round, if the request has taken any of its tokens."""
        num_committed = self.request.num_output_tokens - self.num_tokens
        if not num_committed:
            return
        self.num_tokens += num_committed
        if self.num_rounds < MAX_ROUNDS:
            self.rounds.append(found._replace(num_committed=num_committed))
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


class RoundNotes:
    """Of one scheduler."""

    def __init__(self) -> None:
        """Nothing is noted."""
        self._noted: dict[str, _Noted] = {}
        self._ended: list[_Noted] = []
        self._num_requests = 0
        self._step: list[tuple[_Noted, Round]] = []
        """Of the output that is being taken up."""

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
        if not self._noted or not output.sampled_token_ids:
            return
        drafts = scheduler_output.scheduled_spec_decode_tokens
        forbidden = scheduler_output.num_invalid_spec_tokens or {}
        for request_id, noted in self._noted.items():
            place = output.req_id_to_index.get(request_id)
            tokens = () if place is None else output.sampled_token_ids[place]
            if not tokens:
                continue
            draft = _verified_draft(
                request_id,
                drafts.get(request_id, ()),
                forbidden.get(request_id, 0),
                report,
                place,
            )
            found = Round(draft, len(tokens) - 1, int(tokens[-1]), 0)
            self._step.append((noted, found))

    def updated(self) -> None:
        """vLLM has taken the output up."""
        for noted, found in self._step:
            noted.add(found)
            if noted.request.is_finished():
                self.end(noted.request.request_id)
        self._step.clear()

    def end(self, request_id: str) -> None:
        """A request is gone."""
        noted = self._noted.pop(request_id, None)
        if noted is not None:
            noted.has_ended = True
            self._ended.append(noted)

    def take(self) -> list[dict[str, Any]]:
        """Changes since the last ones (``page/rounds.py``)."""
        new = [each for each in self._noted.values() if each.rounds]
        changes = [each.take() for each in sorted(self._ended + new, key=_number)]
        self._ended.clear()
        return changes


def _number(noted: _Noted) -> int:
    return noted.number


def _verified_draft(
    request_id: str,
    scheduled: Sequence[int],
    num_forbidden: int,
    report: WorkerReport,
    place: int,
) -> list[int]:
    """Draft tokens that were verified, those that a grammar forbade left out."""
    number = len(scheduled) - num_forbidden
    choices: Mapping[str, Any] = report.choices
    if request_id in choices:
        number = min(number, choices[request_id].num_verified)
    if report.drafted is not None:
        return report.drafted.of(place, number)
    return list(scheduled[:number])
