"""Model Runner V1: what a request forbids or discourages, applied to its drafts.

The target samples with biases, penalties, allowed tokens and bad words; vLLM's drafters
know of none of them, so they propose what cannot be accepted, or what the request
asks to avoid. Here each draft step gets the same treatment by the same functions
of vLLM, as if the draft had been committed so far. Drafts stay drafts: whatever is
proposed, the acceptance test makes the output the target's.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.utils import apply_penalties
from vllm.v1.sample.ops.bad_words import apply_bad_words
from vllm.v1.sample.ops.penalties import _convert_to_tensors

from vllm_mtp.drafting.vocabulary import DraftVocabulary
from vllm_mtp.integration.v1.logits_processors import bias_of

_NO_TOKEN = -1


class DraftConstraints:
    """Of the requests of a batch, during a draft pass."""

    def __init__(self, vocab_size: int, may_wait: bool) -> None:
        """Nothing is constrained between passes.

        Args:
            vocab_size: Tokens of the target.
            may_wait: Draft tokens may be read by the host between two draft steps; bad
                words are compared there.
        """
        self._vocab_size = vocab_size
        self._may_wait = may_wait
        self._sampling: Any = None
        self._newest: list[torch.Tensor] = []
        """``[num_requests, any]``: this step's tokens and the draft's so far, -1 where
        there is none."""
        self._outputs: torch.Tensor | None = None
        """``[num_requests, longest]``: tokens before those, padded."""

    def commit(
        self,
        # [num_requests, max_sampled], -1 where there is none
        token_ids: torch.Tensor,
    ) -> None:
        """A step has committed these tokens; vLLM's lists do not have them yet."""
        self._newest = [token_ids]

    def begin_pass(self, sampling_metadata: Any) -> None:
        """Draft steps for the requests of this metadata begin."""
        self._sampling = self._outputs = None
        if sampling_metadata is not None and (
            self._changes_whole(sampling_metadata)
            or sampling_metadata.allowed_token_ids_mask is not None
        ):
            self._sampling = sampling_metadata

    @property
    def are_needed(self) -> bool:
        """Whether a request of this pass has any; the same on all ranks."""
        return self._sampling is not None

    def end_pass(self) -> None:
        """No more draft steps."""
        self._sampling = None
        self._newest = []

    def take(
        self,
        # [num_requests] int64
        choices: torch.Tensor,
    ) -> None:
        """These are the draft tokens of a step."""
        if self._sampling is not None:
            self._newest.append(choices[:, None])

    def apply(
        self,
        # [num_requests, number of columns]
        logits: torch.Tensor,
        vocabulary: DraftVocabulary | None,
    ) -> torch.Tensor:
        """Logits as the target would change them; those given stay as they are.

        Args:
            logits: Of a draft step.
            vocabulary: Whose rows the columns are; None: columns are token ids.
        """
        sampling = self._sampling
        if sampling is None or len(logits) != len(sampling.presence_penalties):
            return logits
        changed = logits.clone()
        if self._changes_whole(sampling):
            changed = _through_whole(changed, vocabulary, self._change_whole)
        if (forbidden := sampling.allowed_token_ids_mask) is not None:
            if vocabulary is not None:
                forbidden = forbidden[:, vocabulary.token_ids]
            changed.masked_fill_(forbidden, -torch.inf)
        return changed

    def _changes_whole(self, sampling: Any) -> bool:
        return (
            _has_penalties(sampling)
            or bias_of(sampling) is not None
            or self._heeds_bad_words(sampling)
        )

    def _change_whole(
        self,
        # [num_requests, vocab_size]
        logits: torch.Tensor,
    ) -> None:
        """Change logits in place."""
        sampling = self._sampling
        if (bias := bias_of(sampling)) is not None:
            bias.apply(logits)
        if _has_penalties(sampling):
            apply_penalties(
                logits,
                sampling.prompt_token_ids,
                self._output_tokens(logits.device),
                sampling.presence_penalties,
                sampling.frequency_penalties,
                sampling.repetition_penalties,
            )
        if self._heeds_bad_words(sampling):
            apply_bad_words(logits, sampling.bad_words_token_ids, self._texts())

    def _heeds_bad_words(self, sampling: Any) -> bool:
        return self._may_wait and bool(sampling.bad_words_token_ids)

    def _output_tokens(self, device: torch.device) -> torch.Tensor:
        """``[num_requests, longest]`` int64, padded with the size of the vocabulary."""
        if self._outputs is None:
            self._outputs = _convert_to_tensors(
                self._sampling.output_token_ids, self._vocab_size, device
            )
        tokens = torch.cat([self._outputs, *self._newest], dim=1)
        return tokens.masked_fill_(tokens == _NO_TOKEN, self._vocab_size)

    def _texts(self) -> list[list[int]]:
        """New tokens of each request, those of the draft included."""
        newest = torch.cat(self._newest, dim=1).tolist()
        return [
            [*before, *(token for token in new if token != _NO_TOKEN)]
            for before, new in zip(self._sampling.output_token_ids, newest, strict=True)
        ]


def _has_penalties(sampling: Any) -> bool:
    return not sampling.no_penalties


def _through_whole(
    # [num_requests, number of columns]
    logits: torch.Tensor,
    vocabulary: DraftVocabulary | None,
    change: Callable[[torch.Tensor], None],
) -> torch.Tensor:
    """Columns, changed as part of the whole vocabulary."""
    if vocabulary is None:
        change(logits)
        return logits
    whole = vocabulary.spread(logits, 0.0)
    change(whole)
    return whole[:, vocabulary.token_ids]
