"""An engine in a process of its own that is told what to do.

The other end of ``tools/engine_process.py``: eval, verify, doctor and vocab ask such
engines; ``benchmarks/engine.py`` adds commands. ``obey`` receives commands through a
pipe and answers each; what vLLM prints goes to standard error. It returns on ``stop``,
and when the other end is closed, so that no engine outlives a command that was killed::

    {"command": "start", "engine": {...}}    arguments of vLLM's EngineArgs
    {"command": "facts"}                                    again
    {"command": "tokenize", "texts": [...]}
    {"command": "tokenize_chats", "conversations": [[{"role": ..., ...}, ...], ...]}
    {"command": "detokenize", "token_ids": [[ids], ...]}
    {"command": "generate", "requests": [{"prompt": [ids], "sampling": {...}}, ...],
     "times_drafting": true}
    {"command": "play", "requests": [...], "is_undisturbed": false, "seed": 0}
    {"command": "rounds"}                                   with ``show_rounds``
    {"command": "stop"}

An answer with ``error`` is the last one. The engine is vLLM's own ``LLMEngine``; what
is asked of it is what a server asks: new tokens after every step, no text.
"""

import gc
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import torch
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.sample import rejection_sampler

from vllm_mtp.integration.cpu import workarounds
from vllm_mtp.integration.fuzz.engine import async_scheduling_on_cpu, engine_args, play
from vllm_mtp.integration.observe.recent_requests import decoder_of, recent_requests
from vllm_mtp.page.texts import with_texts


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


def _add(sums: list[int], values: Sequence[int]) -> None:
    """Add, position by position, in place; ``values`` may be the longer one."""
    sums.extend([0] * (len(values) - len(sums)))
    for position, value in enumerate(values):
        sums[position] += value


class CommandedEngine:
    """An engine and what is counted of it."""

    COMMANDS: ClassVar[tuple[str, ...]] = (
        *("facts", "tokenize", "tokenize_chats", "detokenize", "generate", "play"),
        *("flush_hidden_states", "rounds"),
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
        # all contenders get it. Now: starting an engine installs the faulty one.
        if current_platform.is_cpu():
            workarounds.replace_expand_kernel()
        self.num_requests = 0
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
            "has_mended_sampling": expand is workarounds.expand_kernel,
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

    def detokenize(self, token_ids: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Texts of tokens, without special ones."""
        tokenizer = self.engine.get_tokenizer()
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in token_ids]
        return {"texts": texts}

    def generate(
        self, requests: Sequence[Mapping[str, Any]], times_drafting: bool = False
    ) -> dict[str, Any]:
        """What requests are answered, all at a time.

        Args:
            requests: ``prompt`` (token ids), ``sampling`` (of ``SamplingParams``;
                ``logprobs`` may be among them) and perhaps a ``name`` of its own.
            times_drafting: Also time drafting, which costs a little.

        Returns:
            ``answers``, one for each request: its ``token_ids`` and, if asked for, the
            ``logprobs`` of the likeliest tokens at each of them (pairs); ``metrics``,
            vLLM's of its drafts, if the engine keeps them; ``seconds`` to its end.
            ``num_drafts``: verifications of a request that had draft tokens;
            ``drafted`` and ``accepted``: those tokens, and those of them kept, and
            ``accepted_per_position``. ``decode_steps``, ``decode_seconds``: of steps in
            which every request had its first token; ``draft_seconds`` in them (None
            where the runner cannot be timed).
        """
        self.totals.clear()
        started_at_s = time.perf_counter()
        answers: dict[str, dict[str, Any]] = {
            self.add_request(request): {"token_ids": [], "logprobs": []}
            for request in requests
        }
        prefilling = set(answers)
        decode_steps, decode_seconds, draft_seconds = 0, 0.0, 0.0
        drafter = getattr(self._runner, "drafter", None) if times_drafting else None
        with _timed(drafter, "propose") as drafting:
            while self.engine.has_unfinished_requests():
                is_decode, step_started_at_s = not prefilling, time.perf_counter()
                drafting.clear()
                for output in self.engine.step():
                    answer, new = answers[output.request_id], output.outputs[0]
                    answer["token_ids"] += new.token_ids
                    answer["logprobs"] += map(_pairs, new.logprobs or ())
                    prefilling.discard(output.request_id)
                    if output.finished:
                        kept = new.spec_decode_metrics
                        answer["metrics"] = None if kept is None else kept.to_dict()
                        answer["seconds"] = time.perf_counter() - started_at_s
                if is_decode:
                    decode_steps += 1
                    decode_seconds += time.perf_counter() - step_started_at_s
                    draft_seconds += sum(drafting)
        return {
            "answers": list(answers.values()),
            "num_drafts": self.totals.num_drafts,
            "drafted": sum(self.totals.drafted_per_position),
            "accepted": sum(self.totals.accepted_per_position),
            "accepted_per_position": self.totals.accepted_per_position,
            "decode_steps": decode_steps,
            "decode_seconds": decode_seconds,
            "draft_seconds": None if drafter is None else draft_seconds,
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

    def flush_hidden_states(self) -> dict[str, Any]:
        """Have those written that are recorded; see ``hidden_states_path``."""
        self.engine.collective_rpc("flush_hidden_states")
        return {}

    def rounds(self) -> dict[str, Any]:
        """Rounds of recent requests, newest first, as texts (``page/texts.py``)."""
        recent, decode = recent_requests(self.engine), decoder_of(self.engine)
        kept = recent.newest_first().values() if recent is not None else ()
        return {"requests": [with_texts(each, decode) for each in kept]}

    def add_request(self, request: Mapping[str, Any]) -> str:
        """Queue a request; returns its name."""
        self.num_requests += 1
        name = request.get("name", str(self.num_requests))
        sampling = SamplingParams(
            **{"ignore_eos": True} | request["sampling"],
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


@contextmanager
def _timed(owner: Any, name: str) -> Iterator[list[float]]:
    """Seconds of each call of a method while this lasts; of no owner none."""
    seconds: list[float] = []
    if owner is None:
        yield seconds
        return
    # Our plugin wraps methods of instances, too: those wrappers must come back.
    own, method = vars(owner), getattr(owner, name)
    before = own.get(name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        _wait_for_device()
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            _wait_for_device()
            seconds.append(time.perf_counter() - start)

    own[name] = timed
    try:
        yield seconds
    finally:
        if before is None:
            del own[name]
        else:
            own[name] = before


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _pairs(position: Mapping[int, Any]) -> list[tuple[int, float]]:
    """Tokens and their logarithmic probabilities, of one position."""
    return [(token_id, entry.logprob) for token_id, entry in position.items()]


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
