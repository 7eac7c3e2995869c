"""The texts that a head is tuned on: prompts that the target itself has answered.

The server that answers them drafts with the MTP layers as they are, and records what
they are fed (`hidden_states_path`). Prompts with an answer are not asked again.
"""

import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from vllm_mtp.config import METHOD, ConfigError
from vllm_mtp.tools.engine_arguments import EngineSize
from vllm_mtp.tools.engine_process import START_TIMEOUT_S, EngineGroup, EngineProcess
from vllm_mtp.tools.eval_backends import tokenize_prompts
from vllm_mtp.tools.prompts import Prompt
from vllm_mtp.tools.server_process import exit_on_signals, log_folder

KV_CACHE_MIB = 1024
_WAVE = 4
"""Requests of one order, in those that run at a time: then few wait for the last."""


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
) -> None:
    """Have the target answer prompts that it has not answered yet.

    Args:
        model: Folder or hub name.
        prompts: All of them.
        answering: How.
        folder: For tokens and hidden states.
        token_bytes: Of a hidden state.
        console: Told how far it is.

    Raises:
        ConfigError: There is no room on the disk.
        ServerError: The engine failed.
    """
    known = _names(folder)
    missing = [prompt for prompt in prompts if prompt.id not in known]
    console.print(
        f"{len(known)} texts are there, {len(missing)} prompts to be answered"
    )
    if not missing:
        return
    size = EngineSize(
        model,
        answering.max_model_len,
        answering.concurrency,
        answering.dtype,
        KV_CACHE_MIB,
    )
    folder.mkdir(parents=True, exist_ok=True)
    config = {**answering.speculation, "hidden_states_path": str(folder)}
    with log_folder() as logs, exit_on_signals(), EngineGroup() as group:
        # Hidden states of tokens from the prefix cache would be missing.
        engine = group.launch(METHOD, config, size, logs, enable_prefix_caching=False)
        engine.answer(START_TIMEOUT_S)
        requests = _requests(engine, missing, answering)
        _check_room(folder, requests, token_bytes, console)
        wave = _WAVE * answering.concurrency
        for first in track(
            range(0, len(requests), wave),
            "answering",
            console=console,
            disable=not console.is_terminal,
        ):
            engine.ask("generate", requests=requests[first : first + wave])
            engine.ask("flush_hidden_states")


def _names(folder: Path) -> set[str]:
    from vllm_mtp.tune.shards import PATTERN, Texts

    if not any(folder.rglob(PATTERN)):
        return set()
    return {place.name for place in Texts(folder).places}


def _requests(
    engine: EngineProcess, prompts: Sequence[Prompt], answering: Answering
) -> list[dict[str, Any]]:
    limit = answering.max_model_len - answering.answer_tokens
    ids = tokenize_prompts(engine, prompts)
    # The end of a conversation is where the answer begins.
    return [
        {"name": prompt.id, "prompt": each[-limit:], "sampling": sampling}
        for prompt, each in zip(prompts, ids, strict=True)
        if each and (sampling := answering.sampling(prompt))
    ]


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
