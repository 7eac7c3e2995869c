"""The texts that a head is tuned on: prompts that the target itself has answered.

The server that answers them drafts with the MTP layers as they are, and records what
they are fed (`hidden_states_path`). Prompts with an answer are not asked again.
"""

import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.progress import track

from vllm_mtp.config import METHOD, ConfigError
from vllm_mtp.tools.engine_arguments import EngineSize
from vllm_mtp.tools.engine_process import START_TIMEOUT_S, Commanded, EngineGroup
from vllm_mtp.tools.eval_backends import tokenize_prompts
from vllm_mtp.tools.prompts import Prompt
from vllm_mtp.tools.ray_engines import ray_engines, whole
from vllm_mtp.tools.server_process import exit_on_signals, log_folder

KV_CACHE_MIB = 1024
_WITHOUT_CACHE = {"enable_prefix_caching": False}
"""Hidden states of tokens from the prefix cache would be missing."""
_WAVE = 4
"""Requests of one order, in those that run at a time: then few wait for the last."""

Order = TypeVar("Order")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Answering:
    """How prompts are answered."""

    answer_tokens: int
    """At most."""
    max_model_len: int
    concurrency: int
    temperature: float
    """Of sampled answers."""
    sampled_share: float
    """The others are greedy."""
    dtype: str
    speculation: dict[str, Any]
    """Speculative config."""

    def sampling(self, prompt: Prompt) -> dict[str, Any]:
        """Of a prompt: the same whenever it is asked."""
        number = zlib.crc32(prompt.id.encode())
        is_sampled = number / 2**32 < self.sampled_share
        return {
            "temperature": self.temperature if is_sampled else 0.0,
            "max_tokens": self.answer_tokens,
            "ignore_eos": False,
        }


def collect_texts(
    model: str,
    prompts: Sequence[Prompt],
    answering: Answering,
    folder: Path,
    token_bytes: int,
    console: Console,
    num_engines: int | None = None,
) -> None:
    """Have the target answer prompts that it has not answered yet.

    Args:
        model: Folder or hub name.
        prompts: All of them.
        answering: How.
        folder: For tokens and hidden states.
        token_bytes: Of a hidden state.
        console: Told how far it is.
        num_engines: On a Ray cluster, whose machines all see the folder; None for one
            engine here.

    Raises:
        ConfigError: There is no room on the disk, or Ray cannot be used.
        ServerError: The engine failed.
    """
    known = _names(folder)
    missing = [prompt for prompt in prompts if prompt.id not in known]
    console.print(
        f"{len(known)} texts are there, {len(missing)} prompts to be answered"
    )
    if not missing:
        return
    folder.mkdir(parents=True, exist_ok=True)
    size = EngineSize(
        model,
        answering.max_model_len,
        answering.concurrency,
        answering.dtype,
        KV_CACHE_MIB,
    )
    config = answering.speculation
    with (
        _one_engine(size, config, folder)
        if num_engines is None
        else _on_ray(num_engines, size, config, folder, console)
    ) as engines:
        work = partial(_requests, answering)
        (requests,) = engines.results(work, [missing], whole)
        _check_room(folder, requests, token_bytes, console)
        wave = _WAVE * answering.concurrency
        orders = [requests[i : i + wave] for i in range(0, len(requests), wave)]
        for _ in track(
            engines.results(_record, orders, partial(_unanswered, folder)),
            "answering",
            total=len(orders),
            console=console,
            disable=not console.is_terminal,
        ):
            pass


def _names(folder: Path) -> set[str]:
    from vllm_mtp.tune.shards import PATTERN, Texts

    if not any(folder.rglob(PATTERN)):
        return set()
    return {place.name for place in Texts(folder).places}


class _Engines(Protocol):
    """One engine or several."""

    def results(
        self,
        work: Callable[[Commanded, Order], Result],
        orders: Sequence[Order],
        remaining: Callable[[Order], Order | None],
    ) -> Iterator[Result]:
        """See `RayEngines.results`."""


class _OneEngine:
    """An engine here does one order after another."""

    def __init__(self, engine: Commanded) -> None:
        self._engine = engine

    def results(
        self,
        work: Callable[[Commanded, Order], Result],
        orders: Sequence[Order],
        remaining: Callable[[Order], Order | None],
    ) -> Iterator[Result]:
        """None is done twice, so nothing remains of one."""
        for order in orders:
            yield work(self._engine, order)


@contextmanager
def _one_engine(
    size: EngineSize, config: dict[str, Any], folder: Path
) -> Iterator[_Engines]:
    config = config | {"hidden_states_path": str(folder)}
    with log_folder() as logs, exit_on_signals(), EngineGroup() as group:
        engine = group.launch(METHOD, config, size, logs, **_WITHOUT_CACHE)
        engine.answer(START_TIMEOUT_S)
        yield _OneEngine(engine)


@contextmanager
def _on_ray(
    num_engines: int,
    size: EngineSize,
    config: dict[str, Any],
    folder: Path,
    console: Console,
) -> Iterator[_Engines]:
    # Shards are numbered, so each engine has a folder of its own.
    with ray_engines(
        num_engines,
        size,
        config,
        console.print,
        _WITHOUT_CACHE,
        lambda number: {"hidden_states_path": str(folder / f"engine-{number}")},
    ) as engines:
        yield engines


def _requests(
    answering: Answering, engine: Commanded, prompts: Sequence[Prompt]
) -> list[dict[str, Any]]:
    limit = answering.max_model_len - answering.answer_tokens
    ids = tokenize_prompts(engine, prompts)
    # The end of a conversation is where the answer begins.
    return [
        {"name": prompt.id, "prompt": each[-limit:], "sampling": sampling}
        for prompt, each in zip(prompts, ids, strict=True)
        if each and (sampling := answering.sampling(prompt))
    ]


def _record(engine: Commanded, requests: Sequence[dict[str, Any]]) -> int:
    """Answer requests; their hidden states are on the disk when this returns."""
    engine.ask("generate", requests=requests)
    engine.ask("flush_hidden_states")
    return len(requests)


def _unanswered(
    folder: Path, requests: list[dict[str, Any]]
) -> list[dict[str, Any]] | None:
    """Those of a lost engine that it has not written; None if there are none."""
    known = _names(folder)
    return [each for each in requests if each["name"] not in known] or None


def _check_room(
    folder: Path,
    requests: Sequence[dict[str, Any]],
    token_bytes: int,
    console: Console,
) -> None:
    num_tokens = sum(
        len(each["prompt"]) + each["sampling"]["max_tokens"] for each in requests
    )
    wanted, free = num_tokens * token_bytes, shutil.disk_usage(folder).free
    console.print(
        f"at most {num_tokens:,} tokens, {wanted / 2**30:.1f} GiB of hidden states "
        f"({free / 2**30:.0f} GiB free)"
    )
    if wanted > free:
        raise ConfigError(
            f"data: {wanted / 2**30:.1f} GiB of hidden states do not fit into "
            f"{free / 2**30:.1f} GiB; take fewer prompts or shorter answers"
        )
