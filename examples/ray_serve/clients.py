"""Clients of the endpoint that count what becomes of their requests."""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from examples.ray_serve.app import SERVED_NAME

REQUEST_TIMEOUT_S = 300.0
MAX_TRIES = 4

Prompt = str | list[int]
"""Text or token ids."""


@dataclass
class Tally:
    """What became of requests."""

    num_sent: int = 0
    num_failed: int = 0
    """Tries that ended in an error."""
    num_retried: int = 0
    num_lost: int = 0
    """Never answered."""
    errors: list[str] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    """Answers by the number of the request."""


class Clients:
    """Send completions, several at a time, and try again what failed."""

    def __init__(self, base_url: str, num_at_once: int, pause_s: float = 0.0) -> None:
        """Describe them; nothing is sent.

        Args:
            base_url: Of the endpoint, with ``/v1``.
            num_at_once: Requests under way at a time.
            pause_s: Of each client, before a request.
        """
        self._pause_s = pause_s
        self.tally = Tally()
        self._client, self._num_at_once = connect(base_url), num_at_once
        self._lock = threading.Lock()

    def send(self, prompts: Sequence[Prompt], max_tokens: int) -> Tally:
        """Send all, greedy, and wait for the answers.

        Args:
            prompts: Of the requests.
            max_tokens: Generated for each.
        """
        done = itertools.count()
        return self.send_until(lambda: next(done) >= len(prompts), prompts, max_tokens)

    def send_until(
        self, is_over: Callable[[], bool], prompts: Sequence[Prompt], max_tokens: int
    ) -> Tally:
        """Send prompts in turn, greedy, and wait for the answers.

        Args:
            is_over: Asked before each request.
            prompts: Of the requests.
            max_tokens: Generated for each.
        """
        with ThreadPoolExecutor(self._num_at_once) as pool:
            running = [
                pool.submit(self._go_on, is_over, prompts, max_tokens)
                for _ in range(self._num_at_once)
            ]
        for each in running:
            each.result()
        return self.tally

    def ask(
        self, prompt: Prompt, max_tokens: int, options: Mapping[str, Any] | None = None
    ) -> str:
        """Send one request, once.

        Args:
            prompt: Text or token ids.
            max_tokens: Generated.
            options: For `mtp_plus`, as in ``docs/request-options.md``.

        Raises:
            openai.APIError: It was refused, or has failed.
        """
        extra = {"ignore_eos": True} | ({"vllm_xargs": options} if options else {})
        answer = self._client.completions.create(
            model=SERVED_NAME,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            extra_body=extra,
        )
        text: str = answer.choices[0].text
        return text

    def _go_on(
        self, is_over: Callable[[], bool], prompts: Sequence[Prompt], max_tokens: int
    ) -> None:
        while True:
            time.sleep(self._pause_s)
            with self._lock:
                if is_over():
                    return
                number = self.tally.num_sent
                self.tally.num_sent += 1
            self._send(number, prompts[number % len(prompts)], max_tokens)

    def _send(self, number: int, prompt: Prompt, max_tokens: int) -> None:
        import openai

        for tries_left in reversed(range(MAX_TRIES)):
            try:
                text = self.ask(prompt, max_tokens)
            except openai.APIError as error:
                with self._lock:
                    self._note(error, tries_left)
            else:
                with self._lock:
                    self.tally.texts[number] = text
                return

    def _note(self, error: Exception, tries_left: int) -> None:
        self.tally.num_failed += 1
        self.tally.errors.append(str(error))
        self.tally.num_retried += tries_left > 0
        self.tally.num_lost += tries_left == 0


def connect(base_url: str) -> Any:
    """A client that tries once: retries are counted here."""
    import openai

    return openai.OpenAI(
        base_url=base_url,
        api_key="unused",
        max_retries=0,
        timeout=REQUEST_TIMEOUT_S,
    )
