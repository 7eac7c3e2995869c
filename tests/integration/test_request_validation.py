"""What cannot be served with drafts is refused at the door, in one sentence."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from vllm_mtp.integration.load.settings import SETTINGS_KEY
from vllm_mtp.integration.scheduler.request_validation import _wrap_all

GRAMMAR = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[0-9]"))


def validate(params: SamplingParams, backend: str, **ours: Any) -> None:
    config = SimpleNamespace(
        additional_config=ours,
        num_speculative_tokens=3,
        structured_outputs_config=SimpleNamespace(backend=backend),
    )
    _wrap_all(lambda *args: None)(SimpleNamespace(vllm_config=config), params)


def test_grammars_of_a_backend_that_cannot_go_back_are_refused() -> None:
    ours = {SETTINGS_KEY: {}}
    with pytest.raises(VLLMValidationError, match="'xgrammar', 'guidance' or"):
        validate(GRAMMAR, "lm-format-enforcer", **ours)
    validate(GRAMMAR, "xgrammar", **ours)
    validate(SamplingParams(), "lm-format-enforcer", **ours)
    validate(GRAMMAR, "lm-format-enforcer")
