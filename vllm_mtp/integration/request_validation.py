"""Requests with bad options of ours are refused at the door, with status 400."""

import functools
from collections.abc import Callable
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor

from vllm_mtp.config import ConfigError
from vllm_mtp.integration.settings import SETTINGS_KEY
from vllm_mtp.request_options import pinned_draft_length

_NAME = "_validate_params"


def install() -> None:
    """Wrap vLLM's validation of request parameters; twice changes nothing.

    Called when an engine with our method is configured: servers of other methods keep
    vLLM's own function.
    """
    original = InputProcessor.__dict__[_NAME]
    if not hasattr(original, "__wrapped__"):
        setattr(InputProcessor, _NAME, _wrap(original))


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _validate_params(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.vllm_config
        if SETTINGS_KEY in config.additional_config:
            try:
                pinned_draft_length(
                    getattr(params, "extra_args", None), config.num_speculative_tokens
                )
            except ConfigError as error:
                raise VLLMValidationError(str(error), parameter="vllm_xargs") from None
        return original(self, params, *args, **kwargs)

    return _validate_params
