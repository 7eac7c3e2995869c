"""The engine of the benchmarks: as `CommandedEngine`, told more.

Further commands and arguments::

    {"command": "begin", ..., "timed": "host", "cached": [[ids], ...]}
    {"command": "step", "seconds": 0.08, "core": 1}
    {"command": "round", "waves": ..., "concurrency": 4}    begin, all steps, result
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from vllm_mtp.integration import commanded_engine
from vllm_mtp.integration.commanded_engine import CommandedEngine
from vllm_mtp.integration.step_split import Parts, wrapping

SCHEDULE, UPDATE, WORKER = "schedule", "update", "worker"
HOST_PARTS = (SCHEDULE, UPDATE, WORKER)


class BenchEngine(CommandedEngine):
    """An engine that is compared with others, step by step."""

    COMMANDS = (*CommandedEngine.COMMANDS, "round")

    def begin(
        self,
        waves: Sequence[Sequence[Mapping[str, Any]]],
        concurrency: int,
        timed: str | None = None,
        cached: Sequence[Sequence[int]] | None = None,
    ) -> dict[str, Any]:
        """Take a round's requests; none of them runs yet.

        Args:
            waves: See `CommandedEngine.begin`; ``sampling`` may also hold an
                ``allowed_range``, first and last token id.
            concurrency: See there.
            timed: ``parts`` of a step, or ``host``, the CPU time of the thread that
                does it all: also time those, which costs a little.
            cached: Beginnings of prompts, of whole blocks, that are all there will be
                in the prefix cache; None: it is left as it is.
        """
        if cached is not None:
            self._fill_prefix_cache(cached)
        super().begin(waves, concurrency, timed)
        if timed == "host":
            assert self._round is not None
            core = self.engine.engine_core.engine_core
            self._round.parts = self._timers.enter_context(timed_host(core))
        return {}

    def step(self, seconds: float = 0.0, core: int | None = None) -> dict[str, Any]:
        """A step after a pause, and more of them as long as these seconds last.

        Args:
            seconds: How long to go on after the first step.
            core: Where to run, see ``grid/turns.py``; None: where it is.
        """
        if core is not None:
            os.sched_setaffinity(0, {core})
        return super().step(seconds)

    def result(self) -> dict[str, Any]:
        """What was counted in the round, which is over."""
        return super().result() | {"draft_columns": self._draft_columns()}

    def round(
        self, waves: Sequence[Sequence[Mapping[str, Any]]], concurrency: int
    ) -> dict[str, Any]:
        """A whole round without a pause.

        Args:
            waves: See `begin`.
            concurrency: See `begin`.
        """
        self.begin(waves, concurrency)
        assert self._round is not None
        while self._round.step():
            pass
        return self.result()

    def add_request(self, request: Mapping[str, Any]) -> str:
        """Queue a request; returns its name.

        Args:
            request: See `begin`.
        """
        options = dict(request["sampling"])
        if allowed := options.pop("allowed_range", None):
            first, last = allowed
            options["allowed_token_ids"] = _allowed_token_ids(
                first, last, self.engine.vllm_config.use_v2_model_runner
            )
        return super().add_request({**request, "sampling": options})

    def _fill_prefix_cache(self, beginnings: Sequence[Sequence[int]]) -> None:
        assert self.engine.reset_prefix_cache(), "requests are running"
        sampling = {"max_tokens": 1, "temperature": 0.0}
        # The last token of a prompt is computed in any case.
        prompts = [{"prompt": [*b, b[-1]], "sampling": sampling} for b in beginnings]
        if prompts:
            self.generate(prompts)

    def _draft_columns(self) -> int | None:
        """Tokens that our MTP layers choose among now; None where nobody says."""
        try:
            drafter = getattr(self._runner, "drafter", None)
        except AttributeError:  # the workers are other processes
            return None
        return getattr(drafter, "num_draft_columns", None)


def _allowed_token_ids(first: int, last: int, is_v2: bool) -> list[int]:
    """All ids from first to last, or as many as Model Runner V2 allows to be listed."""
    token_ids = list(range(first, last + 1))
    if not is_v2:
        return token_ids
    from vllm.v1.worker.gpu.sample.logit_bias import MAX_NUM_ALLOWED_TOKEN_IDS

    return token_ids[:MAX_NUM_ALLOWED_TOKEN_IDS]


@contextmanager
def timed_host(core: Any) -> Iterator[Parts]:
    """Sum the CPU time of the thread that schedules, learns and feeds the device.

    Args:
        core: vLLM's ``EngineCore``, its worker in the same process. On a CPU the
            worker's part is the model's arithmetic.

    Yields:
        Seconds by `HOST_PARTS`. Nothing waits for a device.
    """
    parts = Parts(dict.fromkeys(HOST_PARTS, 0.0))
    with wrapping(partial(_timed_on_the_cpu, parts=parts)) as wrap:
        wrap(core.scheduler, "schedule", SCHEDULE)
        wrap(core.scheduler, "update_from_output", UPDATE)
        wrap(core.model_executor, "execute_model", WORKER)
        wrap(core.model_executor, "sample_tokens", WORKER)
        yield parts


def _timed_on_the_cpu(
    method: Callable[..., Any], parts: Parts, part: str
) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        try:
            return method(*args, **kwargs)
        finally:
            if parts.is_counting:
                parts.seconds[part] += time.thread_time() - start

    return timed


def obey(connection: Connection) -> None:
    """Obey until told to stop; see `commanded_engine.obey`."""
    commanded_engine.obey(connection, BenchEngine)
