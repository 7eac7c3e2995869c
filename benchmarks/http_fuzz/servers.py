"""The two servers that random requests go to, and what is asked of them first."""

import json
import os
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.http_fuzz.client import FuzzClient
from benchmarks.http_fuzz.requests import (
    CHAT,
    COMPLETIONS,
    SERVED_NAME,
    Seedling,
    chat_messages,
    prompt_texts,
)
from examples.tiny_model import TINY_MODEL
from vllm_mtp.config import METHOD
from vllm_mtp.tools.engine_process import NO_SPECULATION
from vllm_mtp.tools.prompts import load_prompts
from vllm_mtp.tools.server_process import Server, ServerGroup, free_ports, http_get

MAX_MODEL_LEN_TOKENS = 512
SEATS = 8
KV_CACHE_BYTES = 64 * 2**20
REASONING_PARSER = "mtp_plus_fuzz"

_PARSER_FILE = Path(__file__).with_name("reasoning_parser.py")
_CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")

NUM_TEXTS = 12
NUM_CONTINUED_TOKENS = 48
DRAIN_TIMEOUT_S = 20.0
IDLE_METRICS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
)


def serve_command(
    model: str,
    config: Mapping[str, Any] | None,
    port: int,
    dtype: str,
    engine_args: Mapping[str, Any],
) -> list[str]:
    """`vllm serve` with tools, reasoning and a chat template.

    Args:
        model: Folder or hub name.
        config: Value of ``--speculative-config``; None without speculation.
        port: On the loopback interface.
        dtype: Weights and arithmetic.
        engine_args: Further arguments of vLLM's ``EngineArgs``.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
    command += ["--served-model-name", SERVED_NAME, "--enforce-eager"]
    command += ["--max-model-len", str(MAX_MODEL_LEN_TOKENS)]
    command += ["--max-num-seqs", str(SEATS), "--disable-uvicorn-access-log"]
    command += ["--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    if Path(model) == TINY_MODEL:  # of its vocabulary
        command += ["--reasoning-parser", REASONING_PARSER]
        command += ["--reasoning-parser-plugin", str(_PARSER_FILE)]
    command += ["--chat-template", str(_CHAT_TEMPLATE)]
    if config is not None:
        command += ["--speculative-config", json.dumps(dict(config))]
    return command + _options(engine_args)


def _options(engine_args: Mapping[str, Any]) -> list[str]:
    """As `vllm serve` takes them."""
    options = []
    for name, value in engine_args.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            options.append(f"--{option}" if value else f"--no-{option}")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            options += [f"--{option}", text]
    return options


def serve_environ() -> dict[str, str]:
    """Variables of the servers: real processes, if not asked for fewer; one thread."""
    return os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": os.environ.get(
            "VLLM_ENABLE_V1_MULTIPROCESSING", "1"
        ),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_REGEX_COMPILATION_TIMEOUT_S": "60",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def server_pair(
    model: str,
    config: Mapping[str, Any],
    dtype: str,
    engine_args: Mapping[str, Any],
    logs: Path,
) -> ServerGroup:
    """A server without speculation and one with it, not started yet."""
    contenders = {NO_SPECULATION: None, METHOD: config}
    return ServerGroup(
        [
            Server(
                name,
                serve_command(model, each, port, dtype, engine_args),
                port,
                logs / f"{name}.log",
            )
            for (name, each), port in zip(
                contenders.items(), free_ports(len(contenders)), strict=True
            )
        ],
        serve_environ(),
    )


def single_server(model: str, config: Mapping[str, Any], logs: Path) -> ServerGroup:
    """A server with speculation alone, in float32, not started yet."""
    (port,) = free_ports(1)
    command = serve_command(model, config, port, "float32", {})
    server = Server(METHOD, command, port, logs / f"{METHOD}.log")
    return ServerGroup([server], serve_environ())


def restart(group: ServerGroup, timeout_s: float) -> None:
    """Stop what is left of a group and start all of it again."""
    group.stop()
    group.__enter__()
    group.wait_ready(timeout_s, lambda line: None)


def grow_seedlings(
    client: FuzzClient, model: str, seed: int
) -> tuple[list[Seedling], list[int]]:
    """Prompts with their continuations, and tokens of characters in pieces.

    Raises:
        OSError: The server refused.
    """
    rng = random.Random(seed)
    texts = [prompt.plain_text for prompt in load_prompts(None, model, 100)]
    seedlings = []
    for text in prompt_texts(texts, rng, NUM_TEXTS):
        seedlings.append(_seedling(client, COMPLETIONS, "prompt", text))
        messages = chat_messages(text, rng)
        seedlings.append(_seedling(client, CHAT, "messages", messages))
    foreign = client.post("/tokenize", {"model": SERVED_NAME, "prompt": "😀😎猫犬漢é"})
    return seedlings, foreign["tokens"]


def _seedling(client: FuzzClient, path: str, field: str, prompt: Any) -> Seedling:
    body = {"model": SERVED_NAME, field: prompt, "temperature": 0, "ignore_eos": True}
    body |= {"max_tokens": NUM_CONTINUED_TOKENS, "return_token_ids": True}
    body |= {"logprobs": True} if path == CHAT else {"logprobs": 0}
    answer = client.post(path, body)
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    pieces = (
        [each["token"] for each in logprobs["content"]]
        if path == CHAT
        else logprobs["tokens"]
    )
    prompt_ids = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
    return Seedling(
        path, prompt, tuple(prompt_ids), tuple(choice["token_ids"]), tuple(pieces)
    )


def read_metrics(url: str) -> dict[str, float]:
    """A server's metrics, summed over their labels."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(http_get(f"{url}/metrics")):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def wait_idle(url: str, timeout_s: float = DRAIN_TIMEOUT_S) -> list[str]:
    """What a server still holds when all clients have gone; empty if nothing.

    A free block is one that no request holds: what is left for the prefix cache
    counts as free.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        metrics = read_metrics(url)
        held = [
            f"{name} is {metrics.get(name)}"
            for name in IDLE_METRICS
            if metrics.get(name) != 0.0
        ]
        if not held or time.monotonic() > deadline:
            return held
        time.sleep(0.2)
