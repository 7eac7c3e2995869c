"""What a server with our method says to a request's parameters, at the door.

Bad options of ours are refused with status 400. ``min_p`` and ``logit_bias``, which
vLLM refuses wherever it speculates, are let in: on Model Runner V2 vLLM's own sampler
applies them to draft tokens, too, on V1 ours does (`logits_processors_v1`). A grammar
that cannot go back is refused here, where vLLM fails while it compiles it.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from vllm_mtp.config import METHOD, ConfigError
from vllm_mtp.integration.load.settings import SETTINGS_KEY
from vllm_mtp.integration.load.wrapping import wrap_once
from vllm_mtp.request_options import is_recorded, pinned_draft_length

_CANNOT_GO_BACK = "lm-format-enforcer"
"""Backend of structured outputs whose grammars keep no past states."""

_is_ours: ContextVar[bool] = ContextVar("is_ours", default=False)
"""Whether the request that is being validated goes to an engine with our method."""


def install() -> None:
    """Wrap vLLM's validation of request parameters; twice changes nothing.

    Called when an engine with our method is configured: servers of other methods keep
    vLLM's own functions.
    """
    wrap_once(InputProcessor, "_validate_params", _wrap_all)
    wrap_once(SamplingParams, "_validate_spec_decode", _wrap_spec_decode)


def _wrap_all(original: Callable[..., Any]) -> Callable[..., Any]:
    def _validate_params(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.vllm_config
        if SETTINGS_KEY not in config.additional_config:
            return original(self, params, *args, **kwargs)
        extra = getattr(params, "extra_args", None)
        try:
            pinned_draft_length(extra, config.num_speculative_tokens)
            is_recorded(extra)
        except ConfigError as error:
            raise VLLMValidationError(str(error), parameter="vllm_xargs") from None
        _refuse_grammars(params, config.structured_outputs_config.backend)
        token = _is_ours.set(True)
        try:
            return original(self, params, *args, **kwargs)
        finally:
            _is_ours.reset(token)

    return _validate_params


def _refuse_grammars(params: Any, backend: str) -> None:
    if backend == _CANNOT_GO_BACK and getattr(params, "structured_outputs", None):
        raise VLLMValidationError(
            f"structured_outputs is not served with backend {backend!r} and method "
            f"{METHOD!r}: start the server with backend 'xgrammar', 'guidance' or "
            "'outlines'.",
            parameter="structured_outputs",
        )


def _wrap_spec_decode(original: Callable[..., None]) -> Callable[..., None]:
    def _validate_spec_decode(self: Any, speculative_config: Any) -> None:
        if not _is_ours.get():
            original(self, speculative_config)

    return _validate_spec_decode
