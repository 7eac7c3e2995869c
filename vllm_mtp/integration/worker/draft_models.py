"""Workarounds for a draft model of vLLM 0.32 and 0.33: openPangu's.

Its MTP layers run in DeepSeek's frame. That asks the decoder layer in it whether it
returns a part of the rows, and openPangu's cannot answer; it gathers them itself. And
the frame returns two hidden states, which Model Runner V1 expects of DeepSeek's alone.
Either ends the first draft with an exception (docs/upstream/openpangu.md).
"""

from typing import Any

from torch import nn

_ATTRIBUTE = "use_sequence_parallel_moe"
_RETURN_TWO = "OpenPanguMTPModel"


def returns_two(model_config: Any) -> bool:
    """Whether the draft model's head and its next step read different hidden states,
    and vLLM does not say so.

    Args:
        model_config: vLLM's ``ModelConfig`` of the draft model.
    """
    return _RETURN_TWO in model_config.architectures


def complete_decoder_layers(model: nn.Module) -> None:
    """Let decoder layers of MTP layers answer that they return all rows.

    Args:
        model: The drafter's.
    """
    for module in model.modules():
        block = getattr(module, "mtp_block", None)
        if block is not None and not hasattr(block, _ATTRIBUTE):
            setattr(block, _ATTRIBUTE, False)
