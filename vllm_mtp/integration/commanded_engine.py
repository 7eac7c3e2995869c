"""An engine in a process of its own that is told what to do.

The other end of ``tools/engine_process.py``: eval, verify, doctor and the benchmarks
ask such engines. ``obey`` receives commands through a pipe and answers each; what vLLM
prints goes to standard error. It returns on ``stop``, and when the other end is closed,
so that no engine outlives a command that was killed::

    {"command": "start", "engine": {...}}    arguments of vLLM's EngineArgs
    {"command": "facts"}                                    again
    {"command": "tokenize", "texts": [...]}
    {"command": "tokenize_chats", "conversations": [[{"role": ..., ...}, ...], ...]}
    {"command": "begin", "waves": [[{"prompt": [ids], "sampling": {...}}, ...], ...],
     "concurrency": 4, "timed": "parts"}
    {"command": "step", "seconds": 0.08}                    until is_done, then
    {"command": "result"}
    {"command": "generate", "requests": [{"prompt": [ids], "sampling": {...}}, ...]}
    {"command": "play", "requests": [...], "is_undisturbed": false, "seed": 0}
    {"command": "stop"}

An answer with ``error`` is the last one. The engine is vLLM's own ``LLMEngine``; what
is asked of it is what a server asks: new tokens after every step, no text.
"""

import gc
import os
import resource
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import torch
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.sample import rejection_sampler

from vllm_mtp.integration.cpu import workarounds
from vllm_mtp.integration.engine_round import Round, Totals
from vllm_mtp.integration.fuzz.engine import async_scheduling_on_cpu, engine_args, play
from vllm_mtp.integration.observe.stat_logger import MTPPlusStatLogger
from vllm_mtp.integration.observe.step_metrics import StepMetrics
from vllm_mtp.integration.step_split import timed_parts


class CommandedEngine:
    """An engine and what is counted of it."""

    COMMANDS: ClassVar[tuple[str, ...]] = (
        *("facts", "tokenize", "tokenize_chats", "generate", "play"),
        *("begin", "step", "result"),
    )
    """Methods that may be asked for."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Start the engine.

        Args:
            arguments: of vLLM's ``EngineArgs``.
        """
        self.totals = Totals()
        with async_scheduling_on_cpu(bool(arguments.get("async_scheduling"))):
            self.engine = LLMEngine.from_engine_args(
                engine_args(arguments),
                stat_loggers=[lambda config, index: self.totals],
            )
        # Our worker does so for itself; vLLM's own `mtp` samples garbage without it, so
        # all contenders get it (see mends.py). Now: starting installs the faulty one.
        if current_platform.is_cpu():
            workarounds.replace_expand_kernel()
        self.num_requests = 0
        self._cores = os.sched_getaffinity(0)
        self._round: Round | None = None
        self._timers = ExitStack()
        # As vLLM's server does: what lives for ever need not be looked through.
        gc.collect()
        gc.freeze()

    def facts(self) -> dict[str, Any]:
        """What the parent needs to know of the engine."""
        config = self.engine.vllm_config
        speculation = config.speculative_config
        expand = getattr(rejection_sampler.expand_kernel, "func", None)
        return {
            "vocab_size": config.model_config.get_vocab_size(),
            "max_model_len": config.model_config.max_model_len,
            "max_draft_length": speculation.num_speculative_tokens
            if speculation
            else 0,
            "is_v2": config.use_v2_model_runner,
            "has_right_sampling": expand is workarounds.expand_kernel,
            **_memory(),
        }

    def tokenize(self, texts: Sequence[str]) -> dict[str, Any]:
        """Token ids of texts, without special tokens."""
        tokenizer = self.engine.get_tokenizer()
        encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return {"token_ids": encoded}

    def tokenize_chats(
        self, conversations: Sequence[Sequence[Mapping[str, str]]]
    ) -> dict[str, Any]:
        """Token ids of conversations that wait for an answer.

        A tokenizer without a chat template is a base model's: it is given what was
        said, to continue.
        """
        tokenizer = self.engine.get_tokenizer()
        if tokenizer.chat_template is None:
            said = ["\n".join(each["content"] for each in c) for c in conversations]
            return self.tokenize(said)
        encoded = [
            tokenizer.apply_chat_template(
                list(each), add_generation_prompt=True, return_dict=False
            )
            for each in conversations
        ]
        return {"token_ids": encoded}

    def begin(
        self,
        waves: Sequence[Sequence[Mapping[str, Any]]],
        concurrency: int,
        timed: str | None = None,
    ) -> dict[str, Any]:
        """Take a round's requests; none of them runs yet.

        Args:
            waves: requests: ``prompt`` (token ids), ``sampling`` (of
                ``SamplingParams``).
            concurrency: requests in the engine; as one ends the next begins, and a
                wave begins when the last is over.
            timed: ``parts`` of a step: also time those, which costs a little.
        """
        _share_one_core(self._cores)
        gc.collect()
        self.totals.clear()
        self._round = Round(self.engine, self.add_request, waves, concurrency)
        if timed == "parts":
            self._round.parts = self._timers.enter_context(
                timed_parts(self._runner, self._counters())
            )
        return {}

    def step(self, seconds: float = 0.0) -> dict[str, Any]:
        """A step after a pause, and more of them as long as these seconds last.

        Args:
            seconds: how long to go on after the first step.
        """
        assert self._round is not None, "step before begin"
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
            **_memory(),
        }

    def generate(self, requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What requests are answered, all at a time.

        Args:
            requests: See ``begin``; ``logprobs`` may be among the sampling options.

        Returns:
            ``answers``, one for each request: its ``token_ids`` and, if asked for, the
            ``logprobs`` of the likeliest tokens at each of them (pairs); ``metrics``,
            vLLM's of its drafts, if the engine keeps them; ``seconds`` to its end.
            ``drafts``:
            verifications of a request that had draft tokens; ``drafted`` and
            ``accepted``: those tokens, and those of them kept.
        """
        self.totals.clear()
        started_at_s = time.perf_counter()
        answers: dict[str, dict[str, Any]] = {
            self.add_request(request): {"token_ids": [], "logprobs": []}
            for request in requests
        }
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                answer, new = answers[output.request_id], output.outputs[0]
                answer["token_ids"] += new.token_ids
                answer["logprobs"] += map(_pairs, new.logprobs or ())
                if output.finished:
                    kept = new.spec_decode_metrics
                    answer["metrics"] = None if kept is None else kept.to_dict()
                    answer["seconds"] = time.perf_counter() - started_at_s
        return {
            "answers": list(answers.values()),
            "drafts": self.totals.num_drafts,
            "drafted": sum(self.totals.drafted_per_position),
            "accepted": sum(self.totals.accepted_per_position),
        }

    def play(self, **order: Any) -> dict[str, Any]:
        """Requests of the fuzzer; see ``fuzz/engine.py``.

        Returns:
            What it says, ``drafted`` and ``accepted`` tokens, and ``num_preempted``.
        """
        self.totals.clear()
        return {
            **play(self.engine, **order),
            "drafted": sum(self.totals.drafted_per_position),
            "accepted": sum(self.totals.accepted_per_position),
            "num_preempted": self.totals.num_preempted,
        }

    def add_request(self, request: Mapping[str, Any]) -> str:
        """Queue a request; returns its name."""
        self.num_requests += 1
        name = str(self.num_requests)
        sampling = SamplingParams(
            **{"ignore_eos": True} | request["sampling"],
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = TokensPrompt(prompt_token_ids=request["prompt"])
        self.engine.add_request(name, prompt, sampling)
        return name

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

    @property
    def _runner(self) -> Any:
        executor = self.engine.engine_core.engine_core.model_executor
        return executor.driver_worker.worker.model_runner


def _pairs(position: Mapping[int, Any]) -> list[tuple[int, float]]:
    """Tokens and their logarithmic probabilities, of one position."""
    return [(token_id, entry.logprob) for token_id, entry in position.items()]


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


def _answers(
    commands: Iterator[dict[str, Any]], kind: type[CommandedEngine]
) -> Iterator[dict[str, Any]]:
    engine: CommandedEngine | None = None
    for arguments in commands:
        command = arguments.pop("command")
        if command == "stop":
            return
        if command == "start":
            engine = kind(arguments["engine"])
            yield engine.facts()
            continue
        assert engine is not None, f"{command} before start"
        assert command in kind.COMMANDS, command
        yield getattr(engine, command)(**arguments)


def _received(connection: Connection) -> Iterator[dict[str, Any]]:
    with suppress(EOFError, ConnectionError):
        while True:
            yield connection.recv()


def obey(connection: Connection, kind: type[CommandedEngine] = CommandedEngine) -> None:
    """Obey until told to stop, or until nobody is left who could tell.

    Args:
        connection: Commands and answers are dictionaries.
        kind: Of engine.
    """
    try:
        for answer in _answers(_received(connection), kind):
            connection.send(answer)
    except Exception as error:
        traceback.print_exc()
        with suppress(OSError):
            connection.send({"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)
