"""The engine of the benchmarks: as `CommandedEngine`, told more.

Further commands::

    {"command": "begin", "waves": [[{"prompt": [ids], "sampling": {...}}, ...], ...],
     "concurrency": 4, "timed": "parts", "cached": [[ids], ...]}
    {"command": "step", "seconds": 0.08, "core": 1}         until is_done, then
    {"command": "result"}
    {"command": "round", "waves": ..., "concurrency": 4}    begin, all steps, result
"""

import gc
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

import torch
from vllm.platforms import current_platform

from benchmarks.capture import noted_capture
from benchmarks.engine_round import Round
from benchmarks.step_split import counted_launches, timed_parts
from vllm_mtp.integration.commands import commanded_engine
from vllm_mtp.integration.commands.commanded_engine import CommandedEngine
from vllm_mtp.integration.observe.stat_logger import MTPPlusStatLogger
from vllm_mtp.integration.observe.step_metrics import StepMetrics


class BenchEngine(CommandedEngine):
    """An engine that is compared with others, step by step."""

    COMMANDS = (*CommandedEngine.COMMANDS, "begin", "step", "result", "round")

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Start the engine."""
        with noted_capture() as self._captured:
            super().__init__(arguments)
        self._cores = os.sched_getaffinity(0)
        self._round: Round | None = None
        self._timers = ExitStack()

    def facts(self) -> dict[str, Any]:
        """What the parent needs to know of the engine."""
        return super().facts() | _memory() | asdict(self._captured)

    def begin(
        self,
        waves: Sequence[Sequence[Mapping[str, Any]]],
        concurrency: int,
        timed: str | None = None,
        cached: Sequence[Sequence[int]] | None = None,
    ) -> dict[str, Any]:
        """Take a round's requests; none of them runs yet.

        Args:
            waves: Requests: ``prompt`` (token ids), ``sampling`` (of
                ``SamplingParams``, and an ``allowed_range``, first and last token id).
            concurrency: Requests in the engine; as one ends the next begins, and a
                wave begins when the last is over.
            timed: ``parts`` of a step: also time those; ``launches``: count them.
            cached: Beginnings of prompts, of whole blocks, that are all there will be
                in the prefix cache; None: it is left as it is.
        """
        if cached is not None:
            self._fill_prefix_cache(cached)
        _share_one_core(self._cores)
        gc.collect()
        self.totals.clear()
        self._round = Round(self.engine, self.add_request, waves, concurrency)
        if timed == "parts":
            parts = timed_parts(self._runner, self._counters())
            self._round.parts = self._timers.enter_context(parts)
        elif timed == "launches":
            self._round.parts = self._timers.enter_context(counted_launches())
        return {}

    def step(self, seconds: float = 0.0, core: int | None = None) -> dict[str, Any]:
        """A step after a pause, and more of them as long as these seconds last.

        Args:
            seconds: How long to go on after the first step.
            core: Where to run, see ``grid/turns.py``; None: where it is.
        """
        assert self._round is not None, "step before begin"
        if core is not None:
            os.sched_setaffinity(0, {core})
        is_done = not self._round.step(after_pause=True)
        end_s = self._round.clock.seconds + seconds
        while not is_done and self._round.clock.seconds < end_s:
            is_done = not self._round.step()
        return {"is_done": is_done, "seconds": self._round.clock.seconds}

    def result(self) -> dict[str, Any]:
        """What was counted in the round, which is over."""
        assert self._round is not None, "result before begin"
        ended, self._round = self._round, None
        self._timers.close()
        return {
            **asdict(ended.clock),
            **asdict(self.totals),
            "texts_sha256": ended.texts_sha256(),
            "decode_split_seconds": ended.parts and ended.parts.seconds,
            "draft_columns": self._draft_columns(),
            **_memory(),
        }

    def round(
        self, waves: Sequence[Sequence[Mapping[str, Any]]], concurrency: int
    ) -> dict[str, Any]:
        """A whole round without a pause."""
        self.begin(waves, concurrency)
        assert self._round is not None
        while self._round.step():
            pass
        return self.result()

    def add_request(self, request: Mapping[str, Any]) -> str:
        """Queue a request; returns its name."""
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

    def _counters(self) -> Iterator[tuple[Any, Sequence[str]]]:
        """What counts steps for our metrics, in the scheduler and in the front end."""
        metrics = getattr(
            self.engine.engine_core.engine_core.scheduler, "metrics", None
        )
        if isinstance(metrics, StepMetrics):
            yield metrics, StepMetrics.STEP_METHODS
        for each in self.engine.logger_manager.stat_loggers:
            if isinstance(each, MTPPlusStatLogger):
                yield each, ("record",)

    def _draft_columns(self) -> int | None:
        """Tokens that our MTP layers choose among now; None where nobody says."""
        try:
            drafter = getattr(self._runner, "drafter", None)
        except AttributeError:  # the workers are other processes
            return None
        return getattr(drafter, "num_draft_columns", None)


def _share_one_core(cores: set[int]) -> None:
    """Run on the core that all compared engines share, if they compute on one.

    A process tends to stay on the core where it is, and the cores of a virtual machine
    have different neighbours: one may be a third slower than the other for a second or
    for minutes, which would be taken for the contender's own speed.
    Only for rounds: who asks for texts alone may have others at work on this machine.
    """
    if current_platform.is_cpu() and torch.get_num_threads() == 1:
        os.sched_setaffinity(0, {max(cores)})


def _memory() -> dict[str, int]:
    """Largest memory of this process so far."""
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_rss_bytes": 1024 * peak_kib}


def _allowed_token_ids(first: int, last: int, is_v2: bool) -> list[int]:
    """All ids from first to last, or as many as Model Runner V2 allows to be listed."""
    token_ids = list(range(first, last + 1))
    if not is_v2:
        return token_ids
    from vllm.v1.worker.gpu.sample.logit_bias import MAX_NUM_ALLOWED_TOKEN_IDS

    return token_ids[:MAX_NUM_ALLOWED_TOKEN_IDS]


def obey(connection: Connection) -> None:
    """Obey until told to stop; see `commanded_engine.obey`."""
    commanded_engine.obey(connection, BenchEngine)
