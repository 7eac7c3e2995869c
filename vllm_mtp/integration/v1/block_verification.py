"""Model Runner V1: block verification of a batch of which some have drafts."""

from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1.sample import rejection_sampler as theirs

from vllm_mtp.integration.v1.truncation import truncate
from vllm_mtp.verification.block import REJECTED, sample_block


def verify_blocks(
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    sampling_metadata: Any,
    **options: Any,
) -> torch.Tensor:
    """Block verification of sampled requests, vLLM's test of greedy ones.

    Arguments and result like vLLM's ``rejection_sample``.
    """
    output = sample_blocks(
        draft_token_ids,
        num_draft_tokens,
        cu_num_draft_tokens,
        draft_probs,
        target_logits.softmax(dim=-1, dtype=torch.float32),
        bonus_token_ids[:, 0],
        sampling_metadata.generators,
    )
    if sampling_metadata.all_random:
        return output
    greedy = theirs.rejection_sample(
        draft_token_ids,
        num_draft_tokens,
        max_spec_len,
        cu_num_draft_tokens,
        None,
        target_logits,
        bonus_token_ids,
        _AllGreedy(sampling_metadata),
        **options,
    )
    is_greedy = sampling_metadata.temperature == theirs.GREEDY_TEMPERATURE
    return torch.where(is_greedy[:, None], greedy, output)


def sample_blocks(
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    cu_num_draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    # [num_draft_tokens, vocab_size] float32, which is overwritten
    target: torch.Tensor,
    # [num_reqs]
    bonus_token_ids: torch.Tensor,
    # seeded requests, by their place
    generators: Mapping[int, torch.Generator],
) -> torch.Tensor:
    """``[num_reqs, max_spec_len + 1]`` int32: `sample_block` of those with drafts."""
    device = target.device
    lengths = torch.tensor(num_draft_tokens, device=device)
    drafted = [request for request, length in enumerate(num_draft_tokens) if length]
    recovering = torch.rand(len(drafted), dtype=torch.float64, device=device)
    for row, request in enumerate(drafted):
        if request in generators:
            recovering[row].uniform_(generator=generators[request])
    requests = torch.tensor(drafted, device=device)
    output = torch.full(
        (len(lengths), max(num_draft_tokens) + 1),
        REJECTED,
        dtype=torch.int32,
        device=device,
    )
    output[:, 0] = bonus_token_ids
    output[requests] = sample_block(
        draft_token_ids,
        (cu_num_draft_tokens.long() - lengths)[requests],
        lengths[requests],
        draft_probs,
        target,
        bonus_token_ids[requests],
        theirs.generate_uniform_probs(
            len(draft_token_ids), num_draft_tokens, generators, device
        ),
        recovering,
    ).to(torch.int32)
    return output


def distributions(
    # [num_rows, vocab_size], changed in place
    logits: torch.Tensor,
    # [num_reqs] int64: rows of each request, one after another
    num_rows: torch.Tensor,
    sampling_metadata: Any,
) -> torch.Tensor:
    """``[num_rows, vocab_size]`` float32: what plainly sampled requests draw from."""
    given = sampling_metadata

    def of_rows(values: torch.Tensor | None) -> torch.Tensor | None:
        if values is None:
            return None
        return values[: len(num_rows)].repeat_interleave(num_rows, dim=0)

    logits = logits.float()
    if (forbidden := of_rows(given.allowed_token_ids_mask)) is not None:
        logits.masked_fill_(forbidden, -torch.inf)
    temperature = of_rows(given.temperature)
    assert temperature is not None
    logits.div_(temperature[:, None])
    logits = truncate(logits, of_rows(given.top_k), of_rows(given.top_p))
    return torch.softmax(logits, dim=-1, out=logits)


class _AllGreedy:
    """Sampling metadata of a batch, as if all of it were greedy."""

    all_greedy, all_random = True, False

    def __init__(self, sampling_metadata: Any) -> None:
        self.generators = sampling_metadata.generators
        self.temperature = None
