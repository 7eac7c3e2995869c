"""Model Runner V1: a step without drafts goes as if nobody ever drafted.

Whenever speculation is configured vLLM takes its speculative path, with nothing to
verify and nothing to draft as well: it lists draft rows, runs the rejection sampler,
prepares a draft and copies it to the host. On a CPU that is half a millisecond a step.
A step in which the MTP layers rest takes vLLM's other path instead. In the remaining
ones each detour is left out where it would be empty.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_mtp.integration import pause

NO_DRAFT_ATTRIBUTES = (
    "_calc_spec_decode_metadata",
    "_copy_draft_token_ids_to_cpu",
    "model_config",
    "sample_tokens",
    "speculative_config",
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
    rest_like_a_target_alone(runner, drafter)


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


def rest_like_a_target_alone(runner: Any, drafter: Any) -> None:
    """Run steps in which the MTP layers rest as if speculation was not configured.

    Args:
        runner: vLLM's V1 model runner.
        drafter: ours, already in its place.
    """
    # Where scheduling is async the next step reads what drafting has prepared; layers
    # with a recurrent state find theirs on the speculative path only.
    if (
        runner.use_async_scheduling
        or not drafter.rests_while_off
        or runner.model_config.is_hybrid
    ):
        return
    configured = runner.speculative_config
    execute_model, sample_tokens = runner.execute_model, runner.sample_tokens

    def execute_model_of_step(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if not _only_decodes(runner, drafter, scheduler_output):
            return execute_model(scheduler_output, *args, **kwargs)
        # What vLLM asks to choose its path; `sample_tokens` ends the step.
        runner.speculative_config = None
        try:
            return execute_model(scheduler_output, *args, **kwargs)
        except BaseException:
            runner.speculative_config = configured
            raise

    def sample_tokens_of_step(grammar_output: Any) -> Any:
        if runner.speculative_config is not None:
            return sample_tokens(grammar_output)
        state = runner.execute_model_state
        try:
            output = sample_tokens(grammar_output)
        finally:
            runner.speculative_config = configured
        sampled = [token_ids[0] for token_ids in output.sampled_token_ids]
        drafter.keep_unseen(sampled, state.hidden_states)
        return output

    runner.execute_model = execute_model_of_step
    runner.sample_tokens = sample_tokens_of_step


def _only_decodes(runner: Any, drafter: Any, scheduler_output: Any) -> bool:
    """Whether each request has one row, whose next token will be sampled.

    False also where the MTP layers must catch up first, and for models that hand over
    something else than their hidden states.
    """
    requests = scheduler_output.scheduled_cached_reqs
    num_reqs = len(requests.req_ids)
    if (
        not num_reqs
        or scheduler_output.scheduled_new_reqs
        or requests.resumed_req_ids
        or not pause.mtp_layers_rest(
            scheduler_output.num_spec_tokens_to_schedule,
            num_reqs,
            scheduler_output.total_num_scheduled_tokens,
            len(scheduler_output.scheduled_spec_decode_tokens),
        )
        or not drafter.has_room_for_unseen(num_reqs)
        or hasattr(runner.model, "get_mtp_target_hidden_states")
    ):
        return False
    # Of a prompt's chunk that ends before the prompt does, nothing is sampled.
    return all(
        num_computed + 1 == runner.requests[request_id].num_tokens
        for request_id, num_computed in zip(
            requests.req_ids, requests.num_computed_tokens, strict=True
        )
    )
