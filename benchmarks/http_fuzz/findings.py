"""What random requests found: repeated alone, told from ties, shrunk, and grouped."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from benchmarks.http_fuzz.client import Answer, FuzzClient
from benchmarks.http_fuzz.compare import differences
from benchmarks.http_fuzz.requests import CHAT, FuzzRequest, is_determined
from benchmarks.http_fuzz.shrink import shrink
from vllm_mtp.tools.server_process import Server, ServerError

NUM_REPEATS = 3
"""Alone, before a difference counts as one that needs company."""

MAX_SHRUNK = 15
MAX_SUSPECTS = 12
"""Requests that are named when a server dies: twice as many as run at once."""

NUM_LIKELIEST = 5
ENGINE_DEAD = "EngineCore encountered an issue"
"""What clients are told whose requests were under way."""

_PREFIX = re.compile(r"^\(\w+ pid=\d+\) ERROR \S+ \S+ \[[^]]*\] ?")
_FRAME = re.compile(r'File ".*?/((?:vllm|vllm_mtp)/[^"]*", line \d+.*)')
MAX_FRAMES = 8

_EVERYWHERE = {
    "model",
    "prompt",
    "messages",
    "return_token_ids",
    "max_tokens",
    "temperature",
    "seed",
    "stream",
}
"""Options that do not tell one kind of defect from another."""


class Findings:
    """Compares answers; explains what differs when asked to."""

    def __init__(
        self,
        target: FuzzClient,
        speculating: FuzzClient,
        tolerance: float,
        console: Console,
    ) -> None:
        """Nothing was found."""
        self.defects: list[dict[str, Any]] = []
        self.ties: list[dict[str, Any]] = []
        self.target_faults: list[dict[str, Any]] = []
        """Answers of the server without speculation that company has changed."""
        self.num_deaths = 0
        self._clients = (target, speculating)
        self._tolerance, self._console = tolerance, console
        self._waiting: list[tuple[FuzzRequest, Answer, Answer, list[str]]] = []

    @property
    def summary(self) -> str:
        count = sum(each["num_requests"] for each in self.defects)
        return f"{count} different, of {len(self.defects)} kinds; {len(self.ties)} ties"

    @property
    def saw_death(self) -> bool:
        """Whether answers that are not explained yet look like a dead server's."""
        return any(
            answer.status == 0 or ENGINE_DEAD in (answer.error or "")
            for _, *answers, _ in self._waiting
            for answer in answers
            if not answer.is_cut
        )

    def compare(self, request: FuzzRequest, expected: Answer, found: Answer) -> None:
        """Keep a request whose answers differ."""
        if wrong := differences(expected, found, self._tolerance):
            self._waiting.append((request, expected, found, wrong))

    def died(self, server: Server, error: ServerError) -> None:
        """A server is gone: who had no answer from it may have killed it."""
        suspects = [
            request
            for request, *answers, _ in self._waiting
            if any(ENGINE_DEAD in (answer.error or "") for answer in answers)
        ]
        self._waiting.clear()
        self.num_deaths += 1
        defect: dict[str, Any] = {
            "num_requests": 1,
            "number": suspects[0].number if suspects else None,
            "repeats_alone": False,
            "differences": [str(error).partition(", after")[0], *traceback_of(server)],
            "curl": "\n".join(each.as_curl() for each in suspects[:MAX_SUSPECTS]),
            "body": {},
        }
        self.defects.append(defect)
        self._print(defect)

    def explain(self) -> None:
        """Find out about all that were kept: nothing else may run meanwhile."""
        waiting, self._waiting = self._waiting, []
        for request, expected, found, wrong in waiting:
            if tie := self._tie(request, expected, found):
                self.ties.append({"number": request.number, "curl": request.as_curl()})
                self.ties[-1]["tie"] = tie
                continue
            self._defect(request, expected, found, wrong)
            if self.saw_death:
                return

    def _alone(self, request: FuzzRequest) -> list[str]:
        expected, found = (client.ask(request) for client in self._clients)
        wrong = differences(expected, found, self._tolerance)
        if wrong and found.status != 200 and expected.status == 200:
            self._waiting.append((request, expected, found, wrong))
            if self.saw_death:
                return []
            self._waiting.clear()
        return [] if wrong and self._tie(request, expected, found) else wrong

    def _is_of_the_target(
        self, request: FuzzRequest, expected: Answer, found: Answer
    ) -> bool:
        """Whether the server without speculation was wrong beside other requests."""
        alone = self._clients[0].ask(request)
        return bool(differences(alone, expected, self._tolerance)) and not differences(
            alone, found, self._tolerance
        )

    def _defect(
        self, request: FuzzRequest, expected: Answer, found: Answer, wrong: list[str]
    ) -> None:
        alone = next(
            (w for w in (self._alone(request) for _ in range(NUM_REPEATS)) if w), []
        )
        if self.saw_death:
            return
        if not alone and self._is_of_the_target(request, expected, found):
            entry = {"number": request.number, "curl": request.as_curl()}
            self.target_faults.append(entry | {"differences": wrong})
            return
        known = self._known(request) if alone else None
        if known is not None:
            known["num_requests"] += 1
            return
        shrunk, num_trials = request, 0
        if alone and len(self.defects) < MAX_SHRUNK:
            shrunk, num_trials = shrink(request, lambda r: bool(self._alone(r)))
            alone = self._alone(shrunk) or alone
            if self.saw_death:
                return
        defect = {
            "num_requests": 1,
            "number": request.number,
            "repeats_alone": bool(alone),
            "differences": alone or wrong,
            "curl": shrunk.as_curl(),
            "path": shrunk.path,
            "body": dict(shrunk.body),
            "through": shrunk.through,
            "closes_after": shrunk.closes_after,
            "num_trials": num_trials,
            "original": {"differences": wrong, "body": dict(request.body)},
        }
        self.defects.append(defect)
        self._print(defect)

    def _known(self, request: FuzzRequest) -> dict[str, Any] | None:
        """A defect that this request owes its difference to."""
        for defect in self.defects:
            marks = set(defect["body"]) - _EVERYWHERE
            if not defect["repeats_alone"] or not marks or marks - set(request.body):
                continue
            body = {k: v for k, v in request.body.items() if k not in marks}
            if is_determined(body) and not self._alone(replace(request, body=body)):
                return defect
        return None

    def _tie(
        self, request: FuzzRequest, expected: Answer, found: Answer
    ) -> dict[str, Any] | None:
        """Where texts part at tokens that are equally likely: in all that differ."""
        if expected.status != 200 or found.status != 200 or "seed" in request.body:
            return None
        if expected.choices.keys() != found.choices.keys():
            return None
        tie = None
        for index, choice in expected.choices.items():
            given = found.choices[index].token_ids
            position = _first_difference(choice.token_ids, given)
            if position is None:
                continue
            margin = self._margin(request, index, position)
            if margin is None or margin > self._tolerance:
                return None
            tie = {"choice": index, "position": position, "margin": margin}
        return tie

    def _margin(self, request: FuzzRequest, index: int, position: int) -> float | None:
        """Between the two likeliest tokens, in logprobs of the target alone."""
        dropped = ("stream", "stream_options", "logprob_token_ids", "echo")
        body = {k: v for k, v in request.body.items() if k not in dropped}
        is_chat = request.path == CHAT
        body |= {"logprobs": True} if is_chat else {"logprobs": NUM_LIKELIEST}
        body |= {"top_logprobs": NUM_LIKELIEST} if is_chat else {}
        asked = replace(request, body=body, closes_after=None)
        answer = self._clients[0].ask(asked)
        logprobs = answer.choices[index].logprobs if index in answer.choices else []
        if position >= len(logprobs):
            return None
        top = sorted(logprobs[position]["top"].values(), reverse=True)
        return top[0] - top[1] if len(top) > 1 else None

    def _print(self, defect: dict[str, Any]) -> None:
        title = f"Defect (request {defect['number']}):"
        where = "" if defect["repeats_alone"] else " (only beside other requests)"
        lines = [title + where, *defect["differences"], defect["curl"]]
        for line in lines:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _first_difference(wanted: Sequence[int], found: Sequence[int]) -> int | None:
    for position, (a, b) in enumerate(zip(wanted, found, strict=False)):
        if a != b:
            return position
    return None


def traceback_of(server: Server) -> list[str]:
    """The first traceback of a server that died: its last frames, and the error."""
    lines = server.log.read_text(errors="replace").splitlines()
    plain = [_PREFIX.sub("", line) for line in lines if _PREFIX.match(line)]
    cause, frames = "", []
    for line in plain:
        found = _FRAME.search(line)
        if found:
            frames.append(found.group(1))
        elif frames and re.match(r"[A-Za-z_][\w.]*(Error|Exception)\b", line):
            cause = line
            if "ValidationError" not in cause:
                break
            frames.clear()
    return [*frames[-MAX_FRAMES:], cause]
