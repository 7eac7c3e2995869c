"""Who answers an evaluation's prompts: a running server or an engine of our own."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from vllm_mtp.config import METHOD, ConfigError
from vllm_mtp.request_options import AUTO, FLAT_KEY
from vllm_mtp.tools.engine_arguments import EngineSize
from vllm_mtp.tools.engine_process import (
    NO_SPECULATION,
    START_TIMEOUT_S,
    Commanded,
    EngineGroup,
)
from vllm_mtp.tools.prompts import Prompt
from vllm_mtp.tools.server_process import exit_on_signals, log_folder

REQUEST_TIMEOUT_S = 1800.0
DRAFT_METRICS = {"per_request_spec_decode_metrics": "detailed"}
"""Argument of an engine that says what became of each draft."""


class Answer(NamedTuple):
    """What matters of an answer."""

    metrics: Mapping[str, Any] | None
    """vLLM's ``metrics.speculative_decoding``."""
    num_tokens: int
    seconds: float
    token_ids: Sequence[int] = ()
    """Of an engine of our own."""
    text: str = ""
    """If more of the conversation follows."""


class Sampling(NamedTuple):
    """Of every request."""

    draft_length: int | None
    temperature: float
    max_tokens: int

    @property
    def pin(self) -> dict[str, Any]:
        """What the request says of its draft length."""
        length = self.draft_length
        return {FLAT_KEY: AUTO if length is None else length}


class Backend(Protocol):
    """Answers prompts."""

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, Answer]]:
        """Each prompt with its answer, in the order in which they end."""


class ServerBackend:
    """A server that somebody else runs."""

    def __init__(
        self,
        base_url: str,
        model: str | None,
        api_key: str,
        sampling: Sampling,
        concurrency: int,
    ) -> None:
        """Ask the server which model it serves, unless it is named.

        Raises:
            ConfigError: There is no server, or it serves several models.
        """
        # Takes a second to import.
        from openai import OpenAI

        self._client = OpenAI(
            base_url=base_url, api_key=api_key, max_retries=1, timeout=REQUEST_TIMEOUT_S
        )
        self._sampling, self._concurrency = sampling, concurrency
        self._url = base_url
        with _server_errors(base_url):
            served = [each.id for each in self._client.models.list().data]
        if model is None and len(served) != 1:
            raise ConfigError(
                f"model: {base_url} serves {', '.join(served) or 'none'}; name one"
            )
        if model is not None and model not in served:
            raise ConfigError(
                f"model: {base_url} serves {', '.join(served)}, not {model!r}"
            )
        self.model = model or served[0]

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, Answer]]:
        """See `Backend`."""
        with ThreadPoolExecutor(self._concurrency) as pool, _server_errors(self._url):
            asked = {pool.submit(self._ask, prompt): prompt for prompt in prompts}
            try:
                for each in as_completed(asked):
                    yield asked[each], each.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, prompt: Prompt) -> Answer:
        options: dict[str, Any] = {
            "model": self.model,
            "temperature": self._sampling.temperature,
            "max_tokens": self._sampling.max_tokens,
            "extra_body": {"vllm_xargs": self._sampling.pin},
        }
        started_at_s = perf_counter()
        answer: Any
        if prompt.messages:
            messages: Any = [each.model_dump() for each in prompt.messages]
            answer = self._client.chat.completions.create(messages=messages, **options)
            text = answer.choices[0].message.content or ""
        else:
            answer = self._client.completions.create(prompt=prompt.text, **options)
            text = answer.choices[0].text
        seconds = perf_counter() - started_at_s
        metrics = (answer.model_extra or {}).get("metrics") or {}
        usage = answer.usage
        return Answer(
            metrics.get("speculative_decoding"),
            usage.completion_tokens if usage else 0,
            seconds,
            text=text,
        )


@contextmanager
def _server_errors(url: str) -> Iterator[None]:
    from openai import APIConnectionError, APIError

    try:
        yield
    except APIConnectionError:
        raise ConfigError(f"server: nobody answers at {url}") from None
    except APIError as error:
        first_line = str(error).splitlines()[0]
        raise ConfigError(f"server: {url} refused a request: {first_line}") from None


class EngineBackend:
    """An engine of our own."""

    def __init__(
        self, engine: Commanded, sampling: Sampling, concurrency: int, limit: int
    ) -> None:
        """The engine is started."""
        self._engine, self._sampling = engine, sampling
        self._concurrency, self._limit = concurrency, limit

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, Answer]]:
        """See `Backend`."""
        for first in range(0, len(prompts), self._concurrency):
            batch = prompts[first : first + self._concurrency]
            requests = [
                {"prompt": ids, "sampling": self._options} for ids in self._ids(batch)
            ]
            found = self._engine.ask("generate", requests=requests)["answers"]
            for prompt, answer in zip(batch, found, strict=True):
                ids = answer["token_ids"]
                text = self._text_of(ids) if prompt.follow_ups else ""
                yield (
                    prompt,
                    Answer(answer["metrics"], len(ids), answer["seconds"], ids, text),
                )

    def _text_of(self, token_ids: Sequence[int]) -> str:
        (text,) = self._engine.ask("detokenize", token_ids=[token_ids])["texts"]
        return str(text)

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "temperature": self._sampling.temperature,
            "max_tokens": self._sampling.max_tokens,
            "ignore_eos": False,
            "extra_args": self._sampling.pin,
        }

    def _ids(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        found = tokenize_prompts(self._engine, prompts)
        for prompt, ids in zip(prompts, found, strict=True):
            if not 1 <= len(ids) <= self._limit - self._sampling.max_tokens:
                raise ConfigError(
                    f"prompts: {prompt.id!r} has {len(ids)} tokens; allowed are 1 to "
                    f"{self._limit - self._sampling.max_tokens}, so that "
                    f"{self._sampling.max_tokens} more fit into {self._limit}"
                )
        return found


def tokenize_prompts(engine: Commanded, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids, in order; conversations end where an answer begins."""
    texts = [prompt.text for prompt in prompts if prompt.messages is None]
    chats = [
        [message.model_dump() for message in prompt.messages]
        for prompt in prompts
        if prompt.messages is not None
    ]
    of_texts = iter(engine.ask("tokenize", texts=texts)["token_ids"])
    asked = engine.ask("tokenize_chats", conversations=chats)
    of_chats = iter(asked["token_ids"])
    return [next(of_chats if prompt.messages else of_texts) for prompt in prompts]


@contextmanager
def started_engine(
    size: EngineSize, config: Mapping[str, Any] | None, sampling: Sampling
) -> Iterator[EngineBackend]:
    """An engine that is gone when the block ends.

    Args:
        size: Model and room for requests.
        config: Speculative config; None without speculation.
        sampling: Of every request.

    Raises:
        ServerError: It did not start.
    """
    with log_folder() as logs, exit_on_signals(), EngineGroup() as group:
        metrics = {} if config is None else DRAFT_METRICS
        name = NO_SPECULATION if config is None else METHOD
        engine = group.launch(name, config, size, logs, **metrics)
        engine.answer(START_TIMEOUT_S)
        yield EngineBackend(engine, sampling, size.max_num_seqs, size.max_model_len)
