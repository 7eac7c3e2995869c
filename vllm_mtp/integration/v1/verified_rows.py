"""Model Runner V1: each row of a verification as a request of its own.

A verification has a row of logits for each draft token and one for the bonus token.
What a request asks of its logits (penalties, bad words, ``min_tokens``, a thinking
budget ...) depends on the tokens before a row, draft tokens among them. vLLM has a
second version of each for such rows, and several of them are wrong. Here every row is
shown to vLLM's sampler as a request that has generated just the tokens before it, so
that the same code decides as in an engine without speculation.

Rows of requests with 2, 0 and 1 draft tokens (d: draft token, b: bonus token)::

    row                 0      1      2     3      4      5
    request             0      0      0     1      2      2
    decides about       d0     d1     b     b      d0     b
    output before it    c      c d0   c d0 d1   c  c      c d0     (c: committed)
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_mtp.integration.v1.logits_processors import batch_requests, min_p_of
from vllm_mtp.integration.v1.thinking_budgets import ThinkingBudgets


class VerifiedRows(NamedTuple):
    """The rows of a verification.

    Attributes:
        sampling: What each row's request asks for, as of a batch of requests.
        starts: First row of each request.
    """

    sampling: SamplingMetadata
    starts: Sequence[int]


def verified_rows(
    metadata: SpecDecodeMetadata, sampling: SamplingMetadata
) -> VerifiedRows:
    """Take each row of a verification for a request.

    Args:
        metadata: Of the verification.
        sampling: Of the batch's requests; tokens that were committed are in its lists.
    """
    lengths = metadata.num_draft_tokens
    requests = [place for place, n in enumerate(lengths) for _ in range(n + 1)]
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length + 1)
    index = torch.tensor(requests, device=metadata.logits_indices.device)
    drafts = _drafts(metadata) if sampling.output_token_ids else [[] for _ in lengths]
    outputs = _outputs(sampling.output_token_ids, drafts)

    def of_rows(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[index]

    holder = sampling.thinking_budget_state_holder
    if isinstance(holder, ThinkingBudgets):
        holder = holder.of_rows(sampling.output_token_ids, drafts, starts)
    rows = replace(
        sampling,
        temperature=of_rows(sampling.temperature),
        top_p=of_rows(sampling.top_p),
        top_k=of_rows(sampling.top_k),
        generators={},
        prompt_token_ids=of_rows(sampling.prompt_token_ids),
        frequency_penalties=sampling.frequency_penalties[index],
        presence_penalties=sampling.presence_penalties[index],
        repetition_penalties=sampling.repetition_penalties[index],
        output_token_ids=outputs,
        spec_token_ids=None,
        allowed_token_ids_mask=of_rows(sampling.allowed_token_ids_mask),
        bad_words_token_ids={
            row: sampling.bad_words_token_ids[request]
            for row, request in enumerate(requests)
            if request in sampling.bad_words_token_ids
        },
        logitsprocs=_processors(sampling, requests, index, outputs),
        thinking_budget_state_holder=holder,
    )
    return VerifiedRows(rows, starts)


def _drafts(metadata: SpecDecodeMetadata) -> list[list[int]]:
    """Draft tokens of each request; waits for the device."""
    token_ids = metadata.draft_token_ids.tolist()
    drafts, begin = [], 0
    for length in metadata.num_draft_tokens:
        drafts.append(token_ids[begin : begin + length])
        begin += length
    return drafts


def _outputs(
    committed: Sequence[list[int]], drafts: Sequence[list[int]]
) -> list[list[int]]:
    """Output tokens before each row; empty where nobody asks for them."""
    return [
        [*tokens, *draft[:position]]
        for tokens, draft in zip(committed, drafts, strict=bool(committed))
        for position in range(len(draft) + 1)
    ]


def _processors(
    sampling: SamplingMetadata,
    requests: Sequence[int],
    index: torch.Tensor,
    outputs: Sequence[Sequence[int]],
) -> LogitsProcessors:
    processors = []
    asked = batch_requests(sampling.logitsprocs)
    if asked is not None:
        # Where no outputs are known nobody waits for a number of them.
        known = outputs or [[]] * len(requests)
        processors += asked.processors(requests, known)
    min_p = min_p_of(sampling)
    if min_p is not None:
        of_rows = copy.copy(min_p)
        of_rows.min_p = min_p.min_p[index]
        processors.append(of_rows)
    return LogitsProcessors(processors)
