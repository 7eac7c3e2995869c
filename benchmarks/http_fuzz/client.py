"""Sends random requests and puts the answers into one form, streamed or not."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
from openai import (
    APIConnectionError,
    APIError,
    APIStatusError,
    DefaultHttpxClient,
    OpenAI,
)

from benchmarks.http_fuzz.requests import CHAT, CLIENT, FuzzRequest

REQUEST_TIMEOUT_S = 120.0
HUNG = "no answer in time"
DONE = "[DONE]"
_OF_CLIENT = {"model", "prompt", "messages", "stream"}
"""What the client wants as arguments; the rest goes into its ``extra_body``."""


@dataclass
class Choice:
    """One of the `n` texts."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, str]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """``token``, ``logprob`` and ``top`` (token to logprob)."""
    text_offsets: list[int] = field(default_factory=list)
    prompt_logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: Any = None


@dataclass
class Answer:
    """What became of a request.

    Attributes:
        status: Of HTTP; 0 when nothing came in time.
        error: Body of a refusal, or what went wrong.
        choices: By index.
        usage: Counts.
        faults: Where a stream contradicts itself.
        is_cut: The client went away.
    """

    status: int = 200
    error: str | None = None
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    faults: list[str] = field(default_factory=list)
    is_cut: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class FuzzClient:
    """A client of one server."""

    def __init__(self, url: str) -> None:
        """Prepare; nothing is sent."""
        self.url = url
        self._http = httpx.Client(trust_env=False, timeout=REQUEST_TIMEOUT_S)
        self._client = OpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            timeout=REQUEST_TIMEOUT_S,
            max_retries=0,
            http_client=DefaultHttpxClient(trust_env=False),
        )

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer of a request that must not fail.

        Raises:
            OSError: It did.
        """
        response = self._http.post(self.url + path, json=dict(body))
        if response.status_code != 200:
            raise OSError(f"{path}: status {response.status_code}: {response.text}")
        found: dict[str, Any] = response.json()
        return found

    def ask(self, request: FuzzRequest) -> Answer:
        """Send a request and take its answer apart."""
        answer = Answer()
        try:
            with self._events(request, answer) as events:
                _collect(events, request, answer)
        except APIStatusError as error:
            answer.status, answer.error = error.status_code, str(error)
        except APIConnectionError as error:
            answer.status, answer.error = 0, repr(error)
        except APIError as error:  # an event of a stream
            answer.status, answer.error = _status_of(error.body), str(error)
        except httpx.TimeoutException as error:
            answer.status, answer.error = 0, f"{HUNG}: {error!r}"
        except (httpx.HTTPError, ValueError) as error:
            answer.status, answer.error = 0, repr(error)
        except Exception as error:  # the client's own, of which there are many
            answer.status, answer.error = 0, f"the client: {error!r}"
        return answer

    def _events(self, request: FuzzRequest, answer: Answer) -> Any:
        is_for_client = request.through == CLIENT and request.raw_body is None
        if is_for_client and request.body.get("model"):
            return self._through_client(request)
        return self._raw(request, answer)

    @contextmanager
    def _through_client(
        self, request: FuzzRequest
    ) -> Iterator[Iterator[dict[str, Any]]]:
        known = {k: v for k, v in request.body.items() if k in _OF_CLIENT}
        extra = {k: v for k, v in request.body.items() if k not in _OF_CLIENT}
        resource: Any = self._client.completions
        if request.path == CHAT:
            resource = self._client.chat.completions
        given = resource.create(**known, extra_body=extra)
        if not request.is_stream:
            yield iter([given.model_dump()])
            return
        try:
            yield (event.model_dump() for event in given)
        finally:
            given.close()

    @contextmanager
    def _raw(
        self, request: FuzzRequest, answer: Answer
    ) -> Iterator[Iterator[dict[str, Any]]]:
        content = request.raw_body
        if content is None:
            content = json.dumps(dict(request.body))
        with self._http.stream(
            "POST",
            self.url + request.path,
            content=content.encode("latin-1" if request.raw_body else "utf-8"),
            headers={"Content-Type": "application/json"},
        ) as response:
            answer.status = response.status_code
            if response.status_code != 200:
                answer.error = response.read().decode(errors="replace")
                yield iter(())
            elif request.is_stream:
                yield _server_sent_events(response, answer)
            else:
                response.read()
                yield iter([response.json()])


def _server_sent_events(
    response: httpx.Response, answer: Answer
) -> Iterator[dict[str, Any]]:
    is_done = False
    for line in response.iter_lines():
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        if data == DONE:
            is_done = True
            continue
        if is_done:
            answer.faults.append("an event behind the last one")
        yield json.loads(data)
    if not is_done:
        answer.faults.append(f"the stream ended without {DONE}")


def _collect(
    events: Iterator[dict[str, Any]], request: FuzzRequest, answer: Answer
) -> None:
    wants_usage = request.body.get("stream_options") or {}
    for number, event in enumerate(events):
        if request.closes_after is not None and number >= request.closes_after:
            answer.is_cut = True
            return
        if event.get("error"):
            answer.status = _status_of(event["error"])
            answer.error = json.dumps(event["error"])
            return
        for given in event.get("choices") or ():
            _add(answer, given, event)
        if event.get("usage"):
            answer.usage = event["usage"]
            if wants_usage.get("continuous_usage_stats") and event.get("choices"):
                _check_running_usage(answer)
    if request.is_stream and answer.status == 200:
        for index, choice in answer.choices.items():
            if choice.finish_reason is None:
                answer.faults.append(f"choice {index} ended without a finish_reason")


def _status_of(error: Any) -> int:
    """A stream that has begun cannot change its status: the event tells it."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 500


def _check_running_usage(answer: Answer) -> None:
    assert answer.usage is not None
    if len(answer.choices) != 1:
        return
    (choice,) = answer.choices.values()
    told, known = answer.usage.get("completion_tokens"), len(choice.token_ids)
    if known and told != known:
        answer.faults.append(f"usage said {told} tokens when {known} were sent")


def _add(answer: Answer, given: Mapping[str, Any], event: Mapping[str, Any]) -> None:
    index = given.get("index", 0)
    choice = answer.choices.setdefault(index, Choice())
    part = given.get("message") or given.get("delta") or {}
    text = given.get("text") or part.get("content") or ""
    if choice.finish_reason is not None and (text or given.get("finish_reason")):
        answer.faults.append(f"choice {index} went on behind its end")
    choice.text += text
    _add_part(choice, part)
    choice.token_ids += given.get("token_ids") or []
    _add_logprobs(choice, given.get("logprobs"))
    prompt_logprobs = given.get("prompt_logprobs") or event.get("prompt_logprobs")
    choice.prompt_logprobs = prompt_logprobs or choice.prompt_logprobs
    choice.finish_reason = given.get("finish_reason") or choice.finish_reason
    if given.get("stop_reason") is not None:
        choice.stop_reason = given["stop_reason"]


def _add_part(choice: Choice, part: Mapping[str, Any]) -> None:
    """What a chat's message has beside its text."""
    choice.reasoning += part.get("reasoning") or ""
    for position, call in enumerate(part.get("tool_calls") or ()):
        _add_tool_call(choice, call, position)


def _add_tool_call(choice: Choice, call: Mapping[str, Any], position: int) -> None:
    index = call.get("index", position)
    while len(choice.tool_calls) <= index:
        choice.tool_calls.append({"name": "", "arguments": ""})
    function = call.get("function") or {}
    for key in ("name", "arguments"):
        choice.tool_calls[index][key] += function.get(key) or ""


def _add_logprobs(choice: Choice, given: Any) -> None:
    if not given:
        return
    if "content" in given:  # of a chat
        for each in given["content"] or ():
            top = {t["token"]: t["logprob"] for t in each.get("top_logprobs") or ()}
            entry = {k: each.get(k) for k in ("token", "logprob", "bytes")}
            choice.logprobs.append(entry | {"top": top})
        return
    tops = given.get("top_logprobs") or [None] * len(given["tokens"])
    for token, logprob, top in zip(
        given["tokens"], given["token_logprobs"], tops, strict=False
    ):
        entry = {"token": token, "logprob": logprob, "top": top or {}}
        choice.logprobs.append(entry)
    choice.text_offsets += given.get("text_offset") or []
