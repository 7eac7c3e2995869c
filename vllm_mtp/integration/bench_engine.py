"""One engine of the grid benchmark, in a process of its own that is told what to do.

``python -m vllm_mtp.integration.bench_engine`` reads one JSON object a line from
standard input and answers each with one on standard output; what vLLM prints goes to
standard error. It ends on ``stop``, and when its input ends, so that no engine
outlives a benchmark that was killed::

    {"command": "start", "engine": {...}}    arguments of vLLM's EngineArgs
    {"command": "tokenize", "texts": [...]}
    {"command": "round", "waves": [[{"prompt": [ids], "sampling": {...}}, ...], ...],
     "concurrency": 4, "is_split": false}
    {"command": "begin", "waves": ..., "concurrency": ...}   then "step" until is_done,
    {"command": "step"}                                      then "result"
    {"command": "result"}
    {"command": "stop"}

An answer with ``error`` is the last one. The engine is vLLM's own ``LLMEngine``; what
is asked of it is what a server asks: new tokens after every step, no text.
"""

import gc
import hashlib
import json
import os
import resource
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from vllm import EngineArgs, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.sample import rejection_sampler

from vllm_mtp.integration import mends
from vllm_mtp.integration.bench_split import Parts, timed_parts

COMMANDS = ("tokenize", "round", "begin", "step", "result")


@dataclass
class Totals(StatLoggerBase):
    """What vLLM's own statistics say, summed over the steps of a round."""

    num_drafts: int = 0
    """Verifications of a request that had draft tokens."""
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    num_preempted: int = 0

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if iteration_stats is not None:
            self.num_preempted += iteration_stats.num_preempted_reqs
        drafts = getattr(scheduler_stats, "spec_decoding_stats", None)
        if drafts is not None:
            self.num_drafts += drafts.num_drafts
            _add(self.drafted_per_position, drafts.num_draft_tokens_per_pos)
            _add(self.accepted_per_position, drafts.num_accepted_tokens_per_pos)

    def log_engine_initialized(self) -> None:
        pass

    def clear(self) -> None:
        """Begin anew."""
        self.__init__()  # type: ignore[misc]


@dataclass
class Clock:
    """Steps, their time and their tokens.

    The *decode* figures are of the steps in which every running request has had its
    first token: what a prompt costs is not in them. The *full* figures are of those
    of them in which as many requests run as the round is about: how a batch drains
    depends on which request is slow, and is another concurrency.
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
        bench: "BenchEngine",
        waves: Sequence[Sequence[Mapping[str, Any]]],
        concurrency: int,
    ) -> None:
        self.clock = Clock()
        self.parts: Parts | None = None
        self._bench = bench
        self._concurrency = concurrency
        self._waves = deque(waves)
        self._queue: deque[Mapping[str, Any]] = deque()
        self._token_ids: list[list[int]] = []
        """New ones of each request, in the order in which they began."""
        self._running: dict[str, int] = {}
        self._prefilling: set[str] = set()

    def step(self) -> bool:
        """Let the engine do one step; returns whether there is more to do."""
        if not self._queue and not self._running and self._waves:
            self._queue.extend(self._waves.popleft())
        started_at_s = time.perf_counter()
        while self._queue and len(self._running) < self._concurrency:
            name = self._bench.add_request(self._queue.popleft())
            self._running[name] = len(self._token_ids)
            self._token_ids.append([])
            self._prefilling.add(name)
        is_decode = not self._prefilling
        if self.parts is not None:
            self.parts.is_counting = is_decode
        num_tokens, num_requests = 0, len(self._running)
        for output in self._bench.engine.step():
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


class BenchEngine:
    """An engine and what is counted of it."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Start the engine.

        Args:
            arguments: of vLLM's ``EngineArgs``.
        """
        self.totals = Totals()
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(**arguments), stat_loggers=[lambda config, index: self.totals]
        )
        # Our worker does so for itself; vLLM's own `mtp` samples garbage without it, so
        # all contenders get it (see mends.py). Now: starting installs the faulty one.
        if current_platform.is_cpu():
            mends.mend_expand_kernel()
        self.num_requests = 0
        self._round: Round | None = None
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
            "has_mended_sampling": expand is mends.expand_kernel,
            **_memory(),
        }

    def tokenize(self, texts: Sequence[str]) -> dict[str, Any]:
        """Token ids of texts, without special tokens."""
        tokenizer = self.engine.get_tokenizer()
        encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return {"token_ids": encoded}

    def begin(
        self, waves: Sequence[Sequence[Mapping[str, Any]]], concurrency: int
    ) -> dict[str, Any]:
        """Take a round's requests; nothing runs yet.

        Args:
            waves: requests: ``prompt`` (token ids), ``sampling`` (of
                ``SamplingParams``, or ``allowed_range``: first and last token id).
            concurrency: requests in the engine; as one ends the next begins, and a
                wave begins when the last is over.
        """
        gc.collect()
        self.totals.clear()
        self._round = Round(self, waves, concurrency)
        return {}

    def step(self) -> dict[str, Any]:
        """One step of the round."""
        assert self._round is not None, "step before begin"
        is_done = not self._round.step()
        return {"is_done": is_done, "seconds": self._round.clock.seconds}

    def result(self) -> dict[str, Any]:
        """What was counted in the round, which is over."""
        assert self._round is not None, "result before begin"
        ended, self._round = self._round, None
        return {
            **asdict(ended.clock),
            **asdict(self.totals),
            "texts_sha256": ended.texts_sha256(),
            "decode_split_seconds": ended.parts and ended.parts.seconds,
            **_memory(),
        }

    def round(
        self,
        waves: Sequence[Sequence[Mapping[str, Any]]],
        concurrency: int,
        is_split: bool,
    ) -> dict[str, Any]:
        """A whole round without a pause.

        Args:
            waves: see ``begin``.
            concurrency: see ``begin``.
            is_split: also time the parts of a step, which costs a little.
        """
        self.begin(waves, concurrency)
        assert self._round is not None
        with timed_parts(self._runner if is_split else None) as parts:
            self._round.parts = parts
            while self._round.step():
                pass
        return self.result()

    def add_request(self, request: Mapping[str, Any]) -> str:
        """Queue a request; returns its name."""
        self.num_requests += 1
        name = str(self.num_requests)
        options = dict(request["sampling"])
        if allowed := options.pop("allowed_range", None):
            first, last = allowed
            options["allowed_token_ids"] = list(range(first, last + 1))
        sampling = SamplingParams(
            **options,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = TokensPrompt(prompt_token_ids=request["prompt"])
        self.engine.add_request(name, prompt, sampling)
        return name

    @property
    def _runner(self) -> Any:
        executor = self.engine.engine_core.engine_core.model_executor
        return executor.driver_worker.worker.model_runner


def _add(sums: list[int], values: Sequence[int]) -> None:
    """Add, position by position, in place; ``values`` may be the longer one."""
    sums.extend([0] * (len(values) - len(sums)))
    for position, value in enumerate(values):
        sums[position] += value


def _memory() -> dict[str, int]:
    """Largest memory of this process so far."""
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_rss_bytes": 1024 * peak_kib}


@contextmanager
def _protocol_output() -> Iterator[TextIO]:
    """Standard output for answers alone; whatever else prints lands in the log."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with answers:
        yield answers


def _answers(commands: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    engine: BenchEngine | None = None
    for arguments in commands:
        command = arguments.pop("command")
        if command == "stop":
            return
        if command == "start":
            engine = BenchEngine(arguments["engine"])
            yield engine.facts()
            continue
        assert engine is not None, f"{command} before start"
        assert command in COMMANDS, command
        yield getattr(engine, command)(**arguments)


def main() -> None:
    """Obey until told to stop."""
    with _protocol_output() as output:
        try:
            for answer in _answers(map(json.loads, iter(sys.stdin.readline, ""))):
                print(json.dumps(answer), file=output, flush=True)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=output, flush=True)
            sys.exit(1)


if __name__ == "__main__":
    main()
