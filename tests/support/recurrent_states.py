"""Faults of recurrent states, to be planted into this process for good.

Each draft token of a request has a state of its own, and the next step starts from
that of the last accepted one: the attention backends are told how many there were.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch


def accepted_drafts_are_forgotten() -> None:
    """A step starts from the state after the first row of the one before."""
    _tell(lambda num_accepted, max_accepted: torch.ones_like(num_accepted))


def one_rejected_draft_counts() -> None:
    """A step starts from the state one row too far, wherever there is one."""
    _tell(lambda num_accepted, max_accepted: (num_accepted + 1).clamp(max=max_accepted))


def _tell(change: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    from vllm.v1.attention.backends import gdn_attn, mamba2_attn

    for builder in (
        gdn_attn.GDNAttentionMetadataBuilder,
        mamba2_attn.Mamba2AttentionMetadataBuilder,
    ):
        _change_counts(builder, change)


def _change_counts(
    builder: Any, change: Callable[[torch.Tensor, int], torch.Tensor]
) -> None:
    right = builder.build

    @functools.wraps(right)
    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts = kwargs.get("num_accepted_tokens")
        if counts is not None:
            most = 1 + self.vllm_config.num_speculative_tokens
            kwargs["num_accepted_tokens"] = change(counts, most)
        return right(self, *args, **kwargs)

    builder.build = wrong


def states_stay_behind_at_the_end_of_a_block() -> None:
    """With a prefix cache each block has states; the next one needs the last."""
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

    MambaSpecDecodeGPUContext.run_fused_precopy = lambda *args, **kwargs: None
