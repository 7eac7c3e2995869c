"""``min_tokens`` where vLLM's lists hold placeholders of draft tokens."""

import math
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.logits_processor.interface import BatchUpdate

from vllm_mtp.integration.v1.logits_processors import CountsKnownTokens

STOP = 7


@pytest.mark.parametrize(
    ("kind", "is_masked"),
    [(CountsKnownTokens, True), (MinTokensLogitsProcessor, False)],
)
def test_placeholders_are_not_counted(kind: Any, is_masked: bool) -> None:
    """vLLM's own processor counts them: when it does not, ours is needless."""
    processor = kind(VllmConfig(), torch.device("cpu"), False)
    params = SamplingParams(min_tokens=4, stop_token_ids=[STOP])
    tokens = [5, -1, -1, -1]
    processor.update_state(BatchUpdate(1, [], [(0, params, None, tokens)], []))
    processor.update_state(None)
    tokens[1:] = [6]  # of three draft tokens none was accepted
    logits = processor.apply(torch.zeros(1, 16))
    assert (logits[0, STOP] == -math.inf) == is_masked
    tokens += [6, 6]
    processor.update_state(None)
    assert processor.apply(torch.zeros(1, 16))[0, STOP] == 0
