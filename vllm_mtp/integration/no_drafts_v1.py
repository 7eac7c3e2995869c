"""Model Runner V1: a step without drafts goes as if nobody ever drafted.

Whenever speculation is configured vLLM takes its speculative path, with nothing to
verify and nothing to draft as well: it lists draft rows, runs the rejection sampler,
prepares a draft and copies it to the host. On a CPU that is half a millisecond a step.
Each detour is left out where it would be empty, and taken as ever where it is not.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_mtp.integration import pause

NO_DRAFT_METHODS = (
    "_calc_spec_decode_metadata",
    "_copy_draft_token_ids_to_cpu",
    "_get_positions",
    "propose_draft_token_ids",
    "use_async_scheduling",
)


def shorten_steps_without_drafts(runner: Any, drafter: Any) -> None:
    """Wrap the runner's methods that handle drafts.

    Args:
        runner: vLLM's V1 model runner.
        drafter: ours, already in its place.
    """
    runner._calc_spec_decode_metadata = _without_draft_rows(runner)
    runner._copy_draft_token_ids_to_cpu = _without_empty_copies(runner)
    # Where scheduling is async the next step reads what drafting has prepared.
    if not runner.use_async_scheduling and drafter.rests_while_off:
        runner.propose_draft_token_ids = _at_rest_when_off(runner, drafter)


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
        if num_draft_tokens.any():
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


def _at_rest_when_off(runner: Any, drafter: Any) -> Callable[..., Any]:
    original = runner.propose_draft_token_ids

    def propose_draft_token_ids(
        scheduler_output: Any,
        # [num_reqs, max_sampled]
        sampled_token_ids: Any,
        sampling_metadata: Any,
        # [num_rows, hidden_size]
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: Any,
        spec_decode_metadata: Any,
        common_attn_metadata: Any,
        slot_mappings: Any,
    ) -> Any:
        num_reqs = common_attn_metadata.num_reqs
        if (
            not pause.mtp_layers_rest(
                scheduler_output.num_spec_tokens_to_schedule,
                num_reqs,
                common_attn_metadata.num_actual_tokens,
                spec_decode_metadata.max_spec_len,
            )
            # The last row of a prompt's chunk: its next token is not sampled.
            or runner.discard_request_mask.np[:num_reqs].any()
            # Models that hand over something else than their hidden states.
            or hasattr(runner.model, "get_mtp_target_hidden_states")
        ):
            return original(
                scheduler_output,
                sampled_token_ids,
                sampling_metadata,
                hidden_states,
                sample_hidden_states,
                aux_hidden_states,
                spec_decode_metadata,
                common_attn_metadata,
                slot_mappings,
            )
        drafter.put_aside(
            runner._get_positions(num_reqs),
            hidden_states,
            sampled_token_ids[:, 0],
            common_attn_metadata,
        )
        return sampled_token_ids[:, :0]

    return propose_draft_token_ids
