"""A round of requests in one engine: its requests and its clock."""

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.engine.llm_engine import LLMEngine

from benchmarks.step_split import Parts


@dataclass
class Clock:
    """Steps, their time and their tokens.

    The *decode* figures are of the steps in which every running request has had its
    first token: what a prompt costs is not in them, nor a step after a pause. The
    *full* figures are of those of them in which as many requests run as the round is
    about: how a batch drains depends on which request is slow, and is another
    concurrency.
    """

    seconds: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0
    decode_request_steps: int = 0
    """Running requests, summed over these steps."""
    full_seconds: float = 0.0
    full_tokens: int = 0
    full_steps: int = 0
    request_steps: int = 0
    """Running requests that had their first token, summed over all steps: what drafts
    are counted over, whatever step they were verified in."""

    def add(
        self,
        seconds: float,
        num_tokens: int,
        num_requests: int,
        is_decode: bool,
        is_full: bool,
    ) -> None:
        """Take note of one step."""
        self.seconds += seconds
        self.num_tokens += num_tokens
        self.num_steps += 1
        if is_decode:
            self.decode_seconds += seconds
            self.decode_tokens += num_tokens
            self.decode_steps += 1
            self.decode_request_steps += num_requests
        if is_decode and is_full:
            self.full_seconds += seconds
            self.full_tokens += num_tokens
            self.full_steps += 1


class Round:
    """Requests that are served step by step."""

    def __init__(
        self,
        engine: LLMEngine,
        add_request: Callable[[Mapping[str, Any]], str],
        waves: Sequence[Sequence[Mapping[str, Any]]],
        concurrency: int,
    ) -> None:
        """Nothing runs before the first step."""
        self.clock = Clock()
        self.parts: Parts | None = None
        self._engine = engine
        self._add_request = add_request
        self._concurrency = concurrency
        self._waves = deque(waves)
        self._queue: deque[Mapping[str, Any]] = deque()
        self._token_ids: list[list[int]] = []
        """New ones of each request, in the order in which they began."""
        self._running: dict[str, int] = {}
        self._prefilling: set[str] = set()

    def step(self, after_pause: bool = False) -> bool:
        """Let the engine do one step; returns whether there is more to do.

        Args:
            after_pause: Others have had the processor. Its caches hold nothing of this
                engine, which costs a step up to a sixth and the more, the more it does
                besides arithmetic; on a server that goes on that does not happen.
        """
        if not self._queue and not self._running and self._waves:
            self._queue.extend(self._waves.popleft())
        started_at_s = time.perf_counter()
        while self._queue and len(self._running) < self._concurrency:
            name = self._add_request(self._queue.popleft())
            self._running[name] = len(self._token_ids)
            self._token_ids.append([])
            self._prefilling.add(name)
        is_decode = not self._prefilling and not after_pause
        self.clock.request_steps += len(self._running) - len(self._prefilling)
        if self.parts is not None:
            self.parts.is_counting = is_decode
        num_tokens, num_requests = 0, len(self._running)
        for output in self._engine.step():
            new = output.outputs[0].token_ids
            num_tokens += len(new)
            self._token_ids[self._running[output.request_id]] += new
            self._prefilling.discard(output.request_id)
            if output.finished:
                del self._running[output.request_id]
        seconds = time.perf_counter() - started_at_s
        is_full = num_requests == self._concurrency
        self.clock.add(seconds, num_tokens, num_requests, is_decode, is_full)
        return bool(self._running or self._queue or self._waves)

    def texts_sha256(self) -> str:
        """Fingerprint of all new token ids."""
        return hashlib.sha256(json.dumps(self._token_ids).encode()).hexdigest()
