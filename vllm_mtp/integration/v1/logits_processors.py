"""Model Runner V1: what requests ask of their logits, together with speculation.

vLLM leaves ``min_p`` and ``logit_bias`` out of an engine that speculates and refuses
requests that ask for them. Here all of its own processors are kept, for steps that
verify nothing. What they do to the rows of a verification is worked out from the
requests themselves (`verified_rows`): those are in `BatchRequests`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
    process_dict_updates,
)
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor
from vllm.v1.worker import gpu_model_runner

from vllm_mtp.integration.load.compat import check_attributes


class CountsKnownTokens(MinTokensLogitsProcessor):
    """vLLM's ``min_tokens``, which counts tokens when they are known.

    vLLM 0.32 and 0.33 count when a batch is put together. Where scheduling is async
    its lists then hold a placeholder for each draft token that may be accepted, so that
    a request counted as long enough up to K tokens too early, for good.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._updates: list[BatchUpdate] = []

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            self._updates.append(batch_update)

    def count(self) -> None:
        """To be called when the lists of tokens are right, before anything is read."""
        updates, self._updates = self._updates, []
        for update in updates or (None,):
            super().update_state(update)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        self.count()
        return super().apply(logits)


class BatchRequest(NamedTuple):
    """A request of the batch whose logits depend on its parameters, row by row."""

    params: Any
    """vLLM's ``SamplingParams``."""
    output_token_ids: Sequence[int]
    """vLLM's own list, which grows."""


class BatchRequests(LogitsProcessor):
    """Changes no logits; knows who asks for ``min_tokens`` or ``logit_bias``."""

    def __init__(
        self, vllm_config: Any, device: torch.device, is_pin_memory: bool
    ) -> None:
        self.by_index: dict[int, BatchRequest] = {}
        """By place in the batch."""
        self.runner: Any = None
        """vLLM's V1 model runner, once its batch exists."""
        self._arguments = vllm_config, device, is_pin_memory

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.by_index, batch_update, _batch_request)
        if batch_update and self.runner is not None:
            # Where scheduling is async vLLM's lists hold guesses of how many tokens
            # were accepted, which are put right for those who need them.
            batch = self.runner.input_batch
            batch.logitsprocs_need_output_token_ids = self.have_min_tokens

    @property
    def have_min_tokens(self) -> bool:
        """Whether a request asked for a least number of tokens."""
        return any(each.params.min_tokens for each in self.by_index.values())

    def processors(
        self,
        # of each row, its request's place in the batch
        requests: Sequence[int],
        # of each row, the tokens before it
        output_token_ids: Sequence[Sequence[int]],
    ) -> list[LogitsProcessor]:
        """vLLM's, for rows that are taken for requests of their own."""
        if not self.by_index:
            return []
        added: list[Any] = [
            (row, asked.params, None, output)
            for row, (request, output) in enumerate(
                zip(requests, output_token_ids, strict=True)
            )
            if (asked := self.by_index.get(request)) is not None
        ]
        update = BatchUpdate(len(requests), removed=(), added=added, moved=())
        processors: list[LogitsProcessor] = []
        for kind in (MinTokensLogitsProcessor, LogitBiasLogitsProcessor):
            processors.append(kind(*self._arguments))
            processors[-1].update_state(update)
        return processors


def _batch_request(
    params: Any, prompt_token_ids: Any, output_token_ids: Sequence[int]
) -> BatchRequest | None:
    if params.min_tokens or params.logit_bias:
        return BatchRequest(params, output_token_ids)
    return None


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
        # Not vLLM's own list of them: one that it may get would not know draft tokens.
        kinds = (CountsKnownTokens, LogitBiasLogitsProcessor, MinPLogitsProcessor)
        processors = [kind(vllm_config, device, is_pin_memory) for kind in kinds]
        min_tokens, bias, min_p = processors
        check_attributes(min_tokens, ("min_toks",))
        check_attributes(bias, ("biases",))
        check_attributes(min_p, ("min_p", "min_p_count"))
        requests = BatchRequests(vllm_config, device, is_pin_memory)
        return LogitsProcessors([*processors, requests])

    gpu_model_runner.build_logitsprocs = build
    try:
        yield
    finally:
        gpu_model_runner.build_logitsprocs = original


def batch_requests(processors: LogitsProcessors) -> BatchRequests | None:
    """What knows the requests of a batch; None if nothing in the engine does."""
    for processor in processors.argmax_invariant:
        if isinstance(processor, BatchRequests):
            return processor
    return None


def follow_requests(runner: Any) -> None:
    """Let a runner's batch know what its requests ask for.

    Args:
        runner: vLLM's V1 model runner, whose input batch is the final one.
    """
    requests = batch_requests(runner.input_batch.logitsprocs)
    if requests is not None:  # a pooling model has none
        requests.runner = runner


def count_tokens(sampling_metadata: Any) -> None:
    """Let ``min_tokens`` be counted in a step that verifies."""
    for processor in sampling_metadata.logitsprocs.non_argmax_invariant:
        if isinstance(processor, CountsKnownTokens):
            processor.count()


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
    requests = batch_requests(given.logitsprocs)
    return bool(
        given.max_num_logprobs is None
        and given.no_penalties
        and not given.bad_words_token_ids
        and not given.logprob_token_ids
        and not (thinking is not None and thinking.has_tracked_requests())
        and not (requests is not None and requests.have_min_tokens)
        and all(map(_is_idle, given.logitsprocs.non_argmax_invariant))
    )


def _is_idle(processor: Any) -> bool:
    if isinstance(processor, CountsKnownTokens):
        return True  # `BatchRequests` knows who waits for tokens
    if isinstance(processor, MinTokensLogitsProcessor):
        return not processor.min_toks
    return isinstance(processor, LogitBiasLogitsProcessor) and not processor.biases
