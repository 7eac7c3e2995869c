"""What a request of the fuzzer is to vLLM: parameters, prompts, sessions."""

from collections.abc import Mapping
from copy import copy
from typing import Any

from vllm.inputs import TokensPrompt
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_mtp.integration.fuzz.adapters import adapter


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


def prompt_of(chunk: Mapping[str, Any]) -> Any:
    """Text, or token ids as vLLM takes them."""
    prompt = chunk["prompt"]
    if isinstance(prompt, str):
        return prompt
    return TokensPrompt(prompt_token_ids=list(prompt))


class Session:
    """A ``StreamingInput`` session, fed as ``AsyncLLM`` feeds it."""

    def __init__(self, engine: LLMEngine, request: Mapping[str, Any]) -> None:
        self._engine = engine
        self._name = request["name"]
        self._priority = request.get("priority", 0)
        self._adapter = request.get("adapter")
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
            prompt_of({"prompt": prompt}),
            params,
            supported_tasks=engine.get_supported_tasks(),
            lora_request=adapter(engine, self._adapter),
            priority=self._priority,
            resumable=resumable,
        )

    def _add(self, request: Any) -> None:
        self._engine.output_processor.add_request(request, None, None, 0)
        # Both sides extend the prompt; in a server a process border divides them.
        for_core = copy(request)
        for_core.prompt_token_ids = list(request.prompt_token_ids)
        self._engine.engine_core.add_request(for_core)
