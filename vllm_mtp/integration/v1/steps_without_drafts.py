"""Model Runner V1: what a step that verifies no drafts looks like to vLLM.

Whenever speculation is configured vLLM takes its speculative path, with nothing to
verify as well, and lists draft rows that do not exist.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


class _Parts(NamedTuple):
    """What is the same in all such steps of so many requests."""

    # [0] int32 and int64
    nothing: torch.Tensor
    nowhere: torch.Tensor
    # [num_reqs] and [num_reqs + 1] int32
    zeros: torch.Tensor
    rows: torch.Tensor


@lru_cache(maxsize=64)
def _parts(num_reqs: int, device: torch.device) -> _Parts:
    rows = torch.arange(num_reqs + 1, dtype=torch.int32, device=device)
    return _Parts(
        torch.empty(0, dtype=torch.int32, device=device),
        torch.empty(0, dtype=torch.int64, device=device),
        torch.zeros_like(rows[1:]),
        rows,
    )


def metadata_without_drafts(
    # [num_reqs]
    cu_num_scheduled_tokens: np.ndarray[Any, Any],
    device: torch.device,
) -> SpecDecodeMetadata:
    """As ``GPUModelRunner._calc_spec_decode_metadata`` makes it, in one copy."""
    num_reqs = len(cu_num_scheduled_tokens)
    parts = _parts(num_reqs, device)
    last_rows = torch.from_numpy(cu_num_scheduled_tokens - 1)
    return SpecDecodeMetadata(
        draft_token_ids=parts.nothing,
        num_draft_tokens=[0] * num_reqs,
        cu_num_draft_tokens=parts.zeros,
        cu_num_sampled_tokens=parts.rows[1:],
        target_logits_indices=parts.nowhere,
        bonus_logits_indices=parts.rows[:-1],
        logits_indices=last_rows.to(device, non_blocking=True),
    )
