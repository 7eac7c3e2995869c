"""Plays requests of the fuzzer in an engine, step by step.

What happens at which step is written in the requests (see ``tools/fuzz_requests.py``):
they arrive, sessions get their next chunk, some are aborted, some bring a disturbance
of the whole engine with them. So the same requests make
the same play, as far as the engine's own choices allow.

A request that does not share an engine with disturbances is played *undisturbed*: it
arrives at once, is never aborted, and a session gets its next chunk when the last one
is answered.
"""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm import EngineArgs
from vllm.config import KVTransferConfig
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_mtp.control.randomized import RandomController
from vllm_mtp.integration.fuzz.adapters import adapter
from vllm_mtp.integration.fuzz.answers import Answer
from vllm_mtp.integration.fuzz.connector import FuzzConnector
from vllm_mtp.integration.fuzz.disturbances import Disturbances
from vllm_mtp.integration.fuzz.sessions import Session, prompt_of, sampling_params
from vllm_mtp.integration.v1.reference import answer_as_if_alone

MAX_IDLE_STEPS = 3000
"""Steps without any output after which an engine counts as stuck; far more than a
request can wait for a seat."""


@contextmanager
def async_scheduling_on_cpu(wanted: bool) -> Iterator[None]:
    """Within: engines that start schedule asynchronously on a CPU, too.

    The platform switches it off whenever a config is made or made anew, though it
    works there.

    Args:
        wanted: False changes nothing.
    """
    if not (wanted and current_platform.is_cpu()):
        yield
        return
    platform = type(current_platform)
    check = platform.__dict__["check_and_update_config"]

    def keep_async(cls: Any, vllm_config: Any) -> None:
        check.__func__(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = classmethod(keep_async)
    try:
        yield
    finally:
        platform.check_and_update_config = check


def engine_args(arguments: Mapping[str, Any]) -> EngineArgs:
    """vLLM's arguments from plain data."""
    given = dict(arguments)
    if (transfer := given.get("kv_transfer_config")) is not None:
        given["kv_transfer_config"] = KVTransferConfig(**transfer)
    return EngineArgs(**given)


def play(
    engine: LLMEngine,
    requests: Sequence[Mapping[str, Any]],
    is_undisturbed: bool,
    seed: int = 0,
) -> dict[str, Any]:
    """Serve requests from an empty prefix cache until the last has ended.

    Args:
        engine: In this process, without requests.
        requests: See ``tools/fuzz_requests.py``; names are unique.
        is_undisturbed: See above.
        seed: Of the random draft lengths, where they are random.

    Returns:
        ``answers`` by name (see `Answer.as_dict`), ``num_steps``, ``num_disturbed``,
        how often the engine was while it had requests, ``num_copied``, draft tokens
        copied from contexts, and ``died``: the end of the traceback if the engine did,
        with ``in_flight``, the requests that it had then.
    """
    _begin_anew(engine, seed)
    num_copied = _num_copied(engine)
    stage = _Stage(engine, requests, is_undisturbed)
    died = ""
    try:
        stage.run()
    except Exception as error:  # whatever kills an engine is a finding
        traceback.print_exc()
        died = f"{type(error).__name__}: {error}"[:2000]
    return {
        "answers": {name: each.as_dict() for name, each in stage.answers.items()},
        "num_steps": stage.num_steps,
        "num_disturbed": stage.disturbances.num_done,
        "num_adapted": sum(each.get("adapter") is not None for each in requests),
        "num_loaded_tokens": FuzzConnector.num_loaded_tokens,
        "num_copied": _num_copied(engine) - num_copied,
        "died": died,
        "in_flight": [name for name, each in stage.answers.items() if each.is_open],
    }


def _num_copied(engine: LLMEngine) -> int:
    """Draft tokens that were copied from contexts and verified, so far."""
    copying = getattr(engine.engine_core.engine_core.scheduler, "_copying", None)
    return 0 if copying is None else int(copying.num_verified)


def _begin_anew(engine: LLMEngine, seed: int) -> None:
    core = engine.engine_core.engine_core
    FuzzConnector.num_loaded_tokens = 0
    while core.batch_queue:
        # A step of the last play may be on its way still, whose requests are gone;
        # with a KV connector their blocks are free only behind it.
        engine.step()
    assert engine.reset_prefix_cache(reset_connector=True), "requests are running"
    # Compiled in other threads, grammars would be ready at a step that nobody chose.
    core.structured_output_manager._use_async_grammar_compilation = False
    config = engine.vllm_config
    if config.speculative_config is None and not config.use_v2_model_runner:
        worker = core.model_executor.driver_worker.worker
        answer_as_if_alone(worker.model_runner)
    controller = getattr(core.scheduler, "controller", None)
    if isinstance(controller, RandomController):
        controller._random.seed(seed)
    # What sampled requests without a seed draw from.
    torch.manual_seed(seed)


class _Stage:
    """The requests of a play, and what has come back."""

    def __init__(
        self,
        engine: LLMEngine,
        requests: Sequence[Mapping[str, Any]],
        is_undisturbed: bool,
    ) -> None:
        self.answers: dict[str, Answer] = {}
        self.num_steps = 0
        self.disturbances = Disturbances(engine, self._step, self._abort_all)
        self._engine = engine
        self._is_undisturbed = is_undisturbed
        self._sessions: dict[str, Session] = {}
        self._due: dict[int, list[tuple[str, Mapping[str, Any], int]]] = {}
        for request in requests:
            self._plan(request)

    def _plan(self, request: Mapping[str, Any]) -> None:
        start = 0 if self._is_undisturbed else request.get("arrives", 0)
        self._at(start, "arrive", request)
        if self._is_undisturbed:
            return
        if request.get("session"):
            for number, chunk in enumerate(request["chunks"][1:], start=1):
                self._at(start + chunk["step"], "feed", request, number)
            self._at(start + request["ends"], "end", request)
        if request.get("aborts") is not None:
            self._at(start + request["aborts"], "abort", request)
        if (event := request.get("disturbs")) is not None:
            self._at(start + event["step"], "disturb", request)

    def _at(
        self, step: int, what: str, request: Mapping[str, Any], number: int = 0
    ) -> None:
        self._due.setdefault(step, []).append((what, request, number))

    def run(self) -> None:
        step = self._num_idle = 0
        while (
            self._due
            or self.disturbances.is_paused
            or self._engine.has_unfinished_requests()
        ):
            for what, request, number in self._due.pop(step, ()):
                getattr(self, f"_{what}")(request, number)
            step += 1
            if self.disturbances.is_paused:
                self.disturbances.pass_step()
            elif self._engine.has_unfinished_requests():
                self._step()

    def _step(self) -> None:
        outputs = self._engine.step()
        self.num_steps += 1
        self._num_idle = 0 if outputs else self._num_idle + 1
        if self._num_idle > MAX_IDLE_STEPS:
            raise TimeoutError(f"no output for {MAX_IDLE_STEPS} steps")
        for output in outputs:
            self._take(output)

    def _take(self, output: Any) -> None:
        answer = self.answers[output.request_id]
        answer.add(output)
        session = self._sessions.get(output.request_id)
        if session is None:
            return
        if answer.is_open and any(o.finish_reason == "error" for o in output.outputs):
            # The engine has ended it, and a client feeds it no longer.
            answer.is_open = False
            self._engine.abort_request([output.request_id])
        if self._is_undisturbed:
            while answer.is_open and session.is_behind(answer.num_ends):
                self._feed({"name": output.request_id}, 0)

    def _arrive(self, request: Mapping[str, Any], number: int) -> None:
        name = request["name"]
        answer = self.answers[name] = Answer(request)
        is_session = bool(request.get("session"))
        try:
            if is_session:
                self._sessions[name] = Session(self._engine, request)
                self._sessions[name].go_on()
                return
            (chunk,) = request["chunks"]
            params = sampling_params(chunk["sampling"], self._is_undisturbed)
            answer.output_kind = params.output_kind
            self._engine.add_request(
                name,
                prompt_of(chunk),
                params,
                lora_request=adapter(self._engine, request.get("adapter")),
                priority=request.get("priority", 0),
            )
        except Exception as error:
            self._refuse(request, error)

    def _refuse(self, request: Mapping[str, Any], error: Exception) -> None:
        self.answers[request["name"]].refused = f"{type(error).__name__}: {error}"
        self._abort(request, 0)

    def _feed(self, request: Mapping[str, Any], number: int) -> None:
        answer, session = self.answers[request["name"]], self._sessions[request["name"]]
        if not answer.is_open:
            return
        try:
            session.go_on()
        except Exception as error:
            self._refuse(request, error)

    def _end(self, request: Mapping[str, Any], number: int) -> None:
        self._feed(request, number)
        self.answers[request["name"]].is_closing = True

    def _abort(self, request: Mapping[str, Any], number: int) -> None:
        answer = self.answers[request["name"]]
        if answer.is_open:
            answer.was_aborted = not answer.refused
            answer.is_open = False
            self._engine.abort_request([request["name"]])

    def _abort_all(self) -> None:
        for name in self.answers:
            self._abort({"name": name}, 0)

    def _disturb(self, request: Mapping[str, Any], number: int) -> None:
        self.disturbances.begin(request["disturbs"])
