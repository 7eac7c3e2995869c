"""Plays requests of the fuzzer in an engine, step by step.

What happens at which step is written in the requests (see ``lab/fuzz_requests.py``):
they arrive, sessions get their next chunk, some are aborted. So the same requests make
the same play, as far as the engine's own choices allow.

A request that does not share an engine with disturbances is played *undisturbed*: it
arrives at once, is never aborted, and a session gets its next chunk when the last one
is answered.
"""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

from vllm.inputs import TokensPrompt
from vllm.platforms import current_platform
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_mtp.control.randomized import RandomController
from vllm_mtp.integration.fuzz_answers import Answer
from vllm_mtp.integration.reference_v1 import answer_as_if_alone

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


def play(
    engine: LLMEngine,
    requests: Sequence[Mapping[str, Any]],
    is_undisturbed: bool,
    seed: int = 0,
) -> dict[str, Any]:
    """Serve requests from an empty prefix cache until the last has ended.

    Args:
        engine: In this process, without requests.
        requests: See ``lab/fuzz_requests.py``; names are unique.
        is_undisturbed: See above.
        seed: Of the random draft lengths, where they are random.

    Returns:
        ``answers`` by name (see `Answer.as_dict`), ``num_steps``, and ``died``: the end
        of the traceback if the engine did, with ``in_flight``, the requests that it
        had then.
    """
    _begin_anew(engine, seed)
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
        "died": died,
        "in_flight": [name for name, each in stage.answers.items() if each.is_open],
    }


def _begin_anew(engine: LLMEngine, seed: int) -> None:
    core = engine.engine_core.engine_core
    assert engine.reset_prefix_cache(), "requests are running"
    # Compiled in other threads, grammars would be ready at a step that nobody chose.
    core.structured_output_manager._use_async_grammar_compilation = False
    config = engine.vllm_config
    if config.speculative_config is None and not config.use_v2_model_runner:
        worker = core.model_executor.driver_worker.worker
        answer_as_if_alone(worker.model_runner)
    controller = getattr(core.scheduler, "controller", None)
    if isinstance(controller, RandomController):
        controller._random.seed(seed)


def sampling_params(options: Mapping[str, Any], is_final_only: bool) -> SamplingParams:
    """vLLM's object for options that came as JSON.

    Args:
        options: Fields of ``SamplingParams``; enumerations by name, nested objects as
            mappings.
        is_final_only: Answer in one piece, whatever the options say.
    """
    given = dict(options)
    if (biases := given.get("logit_bias")) is not None:
        given["logit_bias"] = {int(i): bias for i, bias in biases.items()}
    if (grammar := given.get("structured_outputs")) is not None:
        given["structured_outputs"] = StructuredOutputsParams(**grammar)
    if (repetition := given.get("repetition_detection")) is not None:
        given["repetition_detection"] = RepetitionDetectionParams(**repetition)
    if (kind := given.get("output_kind")) is not None:
        given["output_kind"] = RequestOutputKind[kind]
    if is_final_only:
        given["output_kind"] = RequestOutputKind.FINAL_ONLY
        given.pop("stream_interval", None)
    return SamplingParams(**given)


def _prompt(chunk: Mapping[str, Any]) -> Any:
    prompt = chunk["prompt"]
    if isinstance(prompt, str):
        return prompt
    return TokensPrompt(prompt_token_ids=list(prompt))


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
        self._engine = engine
        self._is_undisturbed = is_undisturbed
        self._sessions: dict[str, _Session] = {}
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

    def _at(
        self, step: int, what: str, request: Mapping[str, Any], number: int = 0
    ) -> None:
        self._due.setdefault(step, []).append((what, request, number))

    def run(self) -> None:
        step = num_idle = 0
        while self._due or self._engine.has_unfinished_requests():
            for what, request, number in self._due.pop(step, ()):
                getattr(self, f"_{what}")(request, number)
            step += 1
            if not self._engine.has_unfinished_requests():
                continue
            outputs = self._engine.step()
            self.num_steps += 1
            num_idle = 0 if outputs else num_idle + 1
            if num_idle > MAX_IDLE_STEPS:
                raise TimeoutError(f"no output for {MAX_IDLE_STEPS} steps")
            for output in outputs:
                self._take(output)

    def _take(self, output: Any) -> None:
        answer = self.answers[output.request_id]
        answer.add(output)
        session = self._sessions.get(output.request_id)
        if self._is_undisturbed and session is not None:
            while answer.is_open and session.is_behind(answer.num_ends):
                self._feed({"name": output.request_id}, 0)

    def _arrive(self, request: Mapping[str, Any], number: int) -> None:
        name = request["name"]
        answer = self.answers[name] = Answer(request)
        is_session = bool(request.get("session"))
        try:
            if is_session:
                self._sessions[name] = _Session(self._engine, request)
                self._sessions[name].go_on()
                return
            (chunk,) = request["chunks"]
            params = sampling_params(chunk["sampling"], self._is_undisturbed)
            answer.output_kind = params.output_kind
            self._engine.add_request(
                name, _prompt(chunk), params, priority=request.get("priority", 0)
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


class _Session:
    """A ``StreamingInput`` session, fed as ``AsyncLLM`` feeds it."""

    def __init__(self, engine: LLMEngine, request: Mapping[str, Any]) -> None:
        self._engine = engine
        self._name = request["name"]
        self._priority = request.get("priority", 0)
        self._chunks = request["chunks"]
        self._num_fed = 0
        first = sampling_params(self._chunks[0]["sampling"], False)
        self._last = self._process(self._name, [0], first, False)
        engine.input_processor.assign_request_id(self._last)

    def is_behind(self, num_ends: int) -> bool:
        """Whether all chunks fed so far are answered, and there is more to do."""
        return self._num_fed <= min(num_ends, len(self._chunks))

    def go_on(self) -> None:
        """Feed the next chunk, or end after the last one."""
        number, self._num_fed = self._num_fed, self._num_fed + 1
        if number == len(self._chunks):
            self._add(self._last)
        elif number < len(self._chunks):
            chunk = self._chunks[number]
            params = sampling_params(chunk["sampling"], False)
            request = self._process(
                self._last.request_id, chunk["prompt"], params, True
            )
            request.external_req_id = self._name
            self._add(request)

    def _process(self, name: str, prompt: Any, params: Any, resumable: bool) -> Any:
        engine = self._engine
        return engine.input_processor.process_inputs(
            name,
            _prompt({"prompt": prompt}),
            params,
            supported_tasks=engine.get_supported_tasks(),
            priority=self._priority,
            resumable=resumable,
        )

    def _add(self, request: Any) -> None:
        self._engine.output_processor.add_request(request, None, None, 0)
        # Both sides extend the prompt; in a server a process border divides them.
        for_core = copy(request)
        for_core.prompt_token_ids = list(request.prompt_token_ids)
        self._engine.engine_core.add_request(for_core)
