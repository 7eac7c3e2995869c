"""Model Runner V1: steps without drafts go without the detours that would be empty.

Whenever speculation is configured vLLM takes its speculative path, with nothing to
verify and nothing to draft as well: it lists draft rows, runs the rejection sampler,
prepares a draft and copies it to the host. A step in which the MTP layers rest does not
take that path at all (`drafting_disabled`).
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

NO_DRAFT_ATTRIBUTES = (
    "_calc_spec_decode_metadata",
    "_copy_draft_token_ids_to_cpu",
)


def shorten_steps_without_drafts(runner: Any) -> None:
    """Wrap the runner's methods that handle drafts.

    Args:
        runner: vLLM's V1 model runner.
    """
    runner._calc_spec_decode_metadata = _without_draft_rows(runner)
    runner._copy_draft_token_ids_to_cpu = _without_empty_copies(runner)


def _without_draft_rows(runner: Any) -> Callable[..., Any]:
    original, device = runner._calc_spec_decode_metadata, runner.device
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    nowhere = torch.empty(0, dtype=torch.int64, device=device)

    @lru_cache(maxsize=64)
    def parts(num_reqs: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        rows = torch.arange(num_reqs + 1, dtype=torch.int32, device=device)
        return [0] * num_reqs, torch.zeros_like(rows[1:]), rows

    def calc_spec_decode_metadata(
        num_draft_tokens: np.ndarray[Any, Any],
        cu_num_scheduled_tokens: np.ndarray[Any, Any],
    ) -> Any:
        if np.count_nonzero(num_draft_tokens):
            return original(num_draft_tokens, cu_num_scheduled_tokens)
        zeros, no_drafts, rows = parts(len(num_draft_tokens))
        last_rows = torch.from_numpy(cu_num_scheduled_tokens - 1)
        return SpecDecodeMetadata(
            draft_token_ids=nothing,
            num_draft_tokens=zeros,
            cu_num_draft_tokens=no_drafts,
            cu_num_sampled_tokens=rows[1:],
            target_logits_indices=nowhere,
            bonus_logits_indices=rows[:-1],
            logits_indices=last_rows.to(device, non_blocking=True),
        )

    return calc_spec_decode_metadata


def _without_empty_copies(runner: Any) -> Callable[..., None]:
    original = runner._copy_draft_token_ids_to_cpu

    def copy_draft_token_ids_to_cpu(*args: Any, **kwargs: Any) -> None:
        drafts = runner._draft_token_ids
        if torch.is_tensor(drafts) and drafts.shape[1] == 0:
            runner.prev_num_spec_tokens = 0
        else:
            original(*args, **kwargs)

    return copy_draft_token_ids_to_cpu
