"""Model Runner V1 on a CPU: draft tokens accepted by chance, for benchmarks.

vLLM's kernels for GPUs can do it and its kernels for CPUs cannot (0.32). What a request
gets after its accepted draft tokens is vLLM's all the same.
"""

from typing import Any

import torch
from vllm.v1.sample import rejection_sampler as theirs


def accept_by_chance(
    # [num_draft_tokens], -1 where none may be accepted
    draft_token_ids: torch.Tensor,
    # of each request
    num_draft_tokens: list[int],
    max_spec_len: int,
    # [num_reqs]
    cu_num_draft_tokens: torch.Tensor,
    # [num_draft_tokens, vocab_size]
    draft_probs: torch.Tensor | None,
    # [num_draft_tokens, vocab_size]
    target_logits: Any,
    # [num_reqs, 1]
    bonus_token_ids: torch.Tensor,
    sampling_metadata: Any,
    *,
    # [K_max]: chance of each draft token, if those before it are accepted
    synthetic_conditional_rates: torch.Tensor,
    use_fp64_gumbel: bool,
    **_: Any,
) -> torch.Tensor:
    """``[num_reqs, max_spec_len + 1]`` int32, like vLLM's ``rejection_sample``."""
    device = draft_token_ids.device
    lengths = torch.tensor(num_draft_tokens, device=device)[:, None]
    columns = torch.arange(max_spec_len + 1, device=device)
    is_draft = columns < lengths
    uniforms = theirs.generate_uniform_probs(
        len(draft_token_ids), num_draft_tokens, sampling_metadata.generators, device
    )
    rates = synthetic_conditional_rates[columns.expand_as(is_draft)[is_draft]]
    is_accepted = (uniforms < rates) & (draft_token_ids >= 0)
    recovered = _recovered_token_ids(
        draft_token_ids,
        num_draft_tokens,
        max_spec_len,
        cu_num_draft_tokens,
        draft_probs,
        target_logits,
        sampling_metadata,
        use_fp64_gumbel,
    )
    output = bonus_token_ids.to(torch.int32).repeat(1, max_spec_len + 1)
    drafts_or_recovered = torch.where(is_accepted, draft_token_ids, recovered)
    output[is_draft] = drafts_or_recovered.to(torch.int32)
    accepted = torch.zeros_like(is_draft)
    accepted[is_draft] = is_accepted
    num_accepted = accepted.long().cumprod(dim=1).sum(dim=1, keepdim=True)
    return output.masked_fill_(columns > num_accepted, theirs.PLACEHOLDER_TOKEN_ID)


def _recovered_token_ids(
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_logits: Any,
    sampling_metadata: Any,
    use_fp64_gumbel: bool,
) -> torch.Tensor:
    """``[num_draft_tokens]``: what follows if the draft token is not accepted."""
    likeliest: torch.Tensor = target_logits.argmax(dim=-1)
    if sampling_metadata.all_greedy:
        return likeliest
    drawn = theirs.sample_recovered_tokens(
        max_spec_len,
        num_draft_tokens,
        cu_num_draft_tokens,
        draft_token_ids,
        draft_probs,
        target_logits.softmax(dim=-1, dtype=torch.float32),
        sampling_metadata,
        draft_token_ids.device,
        use_fp64_gumbel,
    )
    lengths = torch.tensor(num_draft_tokens, device=drawn.device)
    is_greedy = sampling_metadata.temperature == theirs.GREEDY_TEMPERATURE
    is_greedy = is_greedy[: len(lengths)].repeat_interleave(lengths)
    return torch.where(is_greedy, likeliest.to(drawn.dtype), drawn)
