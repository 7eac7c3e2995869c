"""Model Runner V1: ``min_p`` and ``logit_bias`` together with speculation.

vLLM leaves both out of an engine that speculates and refuses requests that ask for
them. Its processors serve one row of logits for each request; a verification has a row
for each draft token. Here the processors are kept, for the rows that vLLM's sampler
gives them, and their effect is repeated for the rows of draft tokens.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.worker import gpu_model_runner

from vllm_mtp.integration.compat import check_attributes

_BUILT_IN = (
    MinTokensLogitsProcessor,
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
)
"""Not vLLM's own list of them: one that it may get would not know draft tokens."""


@contextmanager
def all_processors() -> Iterator[None]:
    """A V1 model runner that is built meanwhile has all of vLLM's own processors.

    Custom ones stay refused: what they do to a row is not known.
    """
    original = gpu_model_runner.build_logitsprocs

    def build(
        vllm_config: Any,
        device: torch.device,
        is_pin_memory: bool,
        is_pooling_model: bool,
        custom_logitsprocs: Sequence[Any] = (),
    ) -> LogitsProcessors:
        if custom_logitsprocs:
            return original(  # raises
                vllm_config, device, is_pin_memory, is_pooling_model, custom_logitsprocs
            )
        processors = [kind(vllm_config, device, is_pin_memory) for kind in _BUILT_IN]
        min_tokens, bias, min_p = processors
        check_attributes(min_tokens, ("min_toks",))
        check_attributes(bias, ("biases",))
        check_attributes(min_p, ("min_p", "min_p_count"))
        return LogitsProcessors(processors)

    gpu_model_runner.build_logitsprocs = build
    try:
        yield
    finally:
        gpu_model_runner.build_logitsprocs = original


def bias_of(sampling_metadata: Any) -> LogitBiasLogitsProcessor | None:
    """What adds the biases of a batch; None if no request has any."""
    for processor in sampling_metadata.logitsprocs.non_argmax_invariant:
        if isinstance(processor, LogitBiasLogitsProcessor) and processor.biases:
            return processor
    return None


def min_p_of(sampling_metadata: Any) -> MinPLogitsProcessor | None:
    """What cuts off the unlikely tokens of a batch; None if no request wants it."""
    for processor in sampling_metadata.logitsprocs.argmax_invariant:
        if isinstance(processor, MinPLogitsProcessor) and processor.min_p_count:
            return processor
    return None


def is_plainly_greedy(sampling_metadata: Any) -> bool:
    """Whether each token of a batch is the likeliest one, and no more is asked for."""
    given = sampling_metadata
    return bool(
        given.all_greedy
        and given.allowed_token_ids_mask is None
        and _asks_for_tokens_only(given)
    )


def is_plainly_sampled(sampling_metadata: Any) -> bool:
    """Whether all of a batch is sampled, without seeds, and no more is asked for.

    More than a temperature, top-k, top-p and which tokens are allowed.
    """
    given = sampling_metadata
    return bool(
        given.all_random
        and not given.generators
        and min_p_of(given) is None
        and _asks_for_tokens_only(given)
    )


def _asks_for_tokens_only(given: Any) -> bool:
    """No logprobs; no logits depend on what was generated, or on a bias."""
    thinking = given.thinking_budget_state_holder
    return bool(
        given.max_num_logprobs is None
        and given.no_penalties
        and not given.bad_words_token_ids
        and not given.logprob_token_ids
        and not (thinking is not None and thinking.has_tracked_requests())
        and all(map(_is_idle, given.logitsprocs.non_argmax_invariant))
    )


def _is_idle(processor: Any) -> bool:
    if isinstance(processor, MinTokensLogitsProcessor):
        return not processor.min_toks
    return isinstance(processor, LogitBiasLogitsProcessor) and not processor.biases


def add_bias(
    # [num_draft_tokens, vocab_size]
    logits: torch.Tensor,
    num_draft_tokens: Sequence[int],
    sampling_metadata: Any,
) -> None:
    """Add each request's biases to the rows of its draft tokens, in place.

    Args:
        logits: Of the target, the rows of a request together.
        num_draft_tokens: Of each request.
        sampling_metadata: vLLM's, of the batch.
    """
    processor = bias_of(sampling_metadata)
    if processor is None:
        return
    starts = [0, *accumulate(num_draft_tokens)]
    entries = [
        (row, token_id, bias)
        for request, biases in processor.biases.items()
        for row in range(starts[request], starts[request + 1])
        for token_id, bias in biases.items()
    ]
    if entries:
        rows, token_ids, values = zip(*entries, strict=True)
        where = torch.tensor([rows, token_ids], device=logits.device)
        logits[where[0], where[1]] += logits.new_tensor(values)


def cut_by_min_p(
    # [num_draft_tokens, vocab_size]
    logits: torch.Tensor,
    num_draft_tokens: Sequence[int],
    sampling_metadata: Any,
) -> None:
    """Exclude what each request's ``min_p`` excludes, in place.

    Before the temperature is applied: it is for comparing only.

    Args:
        logits: Of the target, with everything else that comes before the temperature.
        num_draft_tokens: Of each request.
        sampling_metadata: vLLM's, of the batch.
    """
    processor = min_p_of(sampling_metadata)
    temperature = sampling_metadata.temperature
    if processor is None or temperature is None:
        return  # greedy: nothing changes
    lengths = torch.tensor(num_draft_tokens, device=logits.device)
    of_rows = copy.copy(processor)
    of_rows.min_p = processor.min_p.repeat_interleave(lengths, dim=0)
    divisors = temperature[: len(lengths)].repeat_interleave(lengths)[:, None]
    kept = of_rows.apply(logits / divisors.masked_fill(divisors == 0, 1.0))
    logits.masked_fill_(kept == -torch.inf, -torch.inf)
