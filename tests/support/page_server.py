"""The page's routes in vLLM's way, over an engine that never ran a model."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from prometheus_client import generate_latest
from tokenizers import Tokenizer
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin

from tests.support.heldout import BUNDLED_CHECKPOINT
from vllm_mtp.integration.load.settings import SETTINGS_KEY
from vllm_mtp.integration.observe.page import RoundsPage
from vllm_mtp.integration.observe.stat_logger import MTPPlusStatLogger
from vllm_mtp.integration.observe.step_metrics import ROUNDS_KEY, STATS_KEY
from vllm_mtp.metrics.stats import SpeculationStats
from vllm_mtp.tools.server_process import free_ports

KEY = "a-secret"
PROMPT = "<script>document.title='owned'</script><img src=x onerror=alert(1)> 😀 café\n"
ANSWER = "</script><b>def</b> quicksort(items): # 🚀\n    return sorted(items)\n"
WRONG = " self.<i>x</i>"
K_MAX = 4

TOKENIZER = Tokenizer.from_file(str(BUNDLED_CHECKPOINT / "tokenizer.json"))


def rounds_of(text: str) -> list[tuple[list[int], int, int, int]]:
    """Rounds that tell a text: without a draft, with rejected tokens, with none."""
    tokens, wrong = TOKENIZER.encode(text).ids, TOKENIZER.encode(WRONG).ids
    rounds: list[tuple[list[int], int, int, int]] = [([], 0, tokens[0], 1)]
    place = 1
    kinds = cycle([(2, 4), (0, 2), (3, 3), (1, 4)])
    while left := tokens[place:]:
        accepted, length = next(kinds)
        kept = min(accepted, len(left) - 1)
        draft = [*left[:kept], *wrong][: max(length, kept)]
        rounds.append((draft, kept, left[kept], kept + 1))
        place += kept + 1
    return rounds


def change_of(number: int, name: str, text: str) -> dict[str, Any]:
    """A request that has ended (``page/rounds.py``)."""
    prompt = TOKENIZER.encode(PROMPT).ids
    return {
        "number": number,
        "name": name,
        "prompt": prompt,
        "num_prompt_tokens": len(prompt),
        "rounds": rounds_of(text),
        "num_left_out": 0,
        "has_ended": True,
    }


class FakeEngine:
    """What the routes ask of ``AsyncLLM``."""

    def __init__(self, show_rounds: int) -> None:
        self.vllm_config = SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=K_MAX),
            model_config=SimpleNamespace(
                served_model_name="m", skip_tokenizer_init=False
            ),
            additional_config={SETTINGS_KEY: {"show_rounds": show_rounds}},
        )
        self.logger = MTPPlusStatLogger(self.vllm_config, [0], writes_lines=False)
        self.logger_manager = SimpleNamespace(stat_loggers=[self.logger])

    def get_tokenizer(self) -> Tokenizer:
        return TOKENIZER

    def step(self, *changes: dict[str, Any]) -> None:
        """A second's statistics arrive."""
        stats = SpeculationStats.empty(K_MAX)
        stats.draft_lengths[:] = [10, 0, 20, 0, 70]
        stats.drafted[:], stats.accepted[:] = [90, 90, 70, 70], [72, 54, 35, 21]
        stats.seconds = {"target": 0.6, "verify": 0.1, "draft": 0.2, "prefill": 0.1}
        stats.num_tokens = 282
        sent = {STATS_KEY: stats.to_dict(), ROUNDS_KEY: list(changes)}
        self.logger.record(SimpleNamespace(kv_connector_stats=sent), None)


def page_app(engine: FakeEngine | None, key: str | None = KEY) -> FastAPI:
    """Routes and authentication as vLLM's server has them."""
    app, plugin = FastAPI(), RoundsPage()
    assert isinstance(plugin, EndpointPlugin)
    plugin.attach_router(app)
    app.state.mtp_plus_engine = engine

    @app.get("/metrics")
    def metrics() -> PlainTextResponse:
        return PlainTextResponse(generate_latest().decode())

    if key is not None:
        app.add_middleware(AuthenticationMiddleware, tokens=[key])
    return app


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The address of a server of this app, in a thread."""
    (port,) = free_ports(1)
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not server.started:
            assert thread.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
