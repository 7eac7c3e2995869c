"""Model Runner V1: vLLM's rejection sampler, with more than one acceptance test."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample import rejection_sampler as theirs
from vllm.v1.sample.rejection_sampler import RejectionSampler

from vllm_mtp.drafting.temperature import MAX_ROWS
from vllm_mtp.drafting.vocabulary import DraftVocabulary
from vllm_mtp.integration.block_verification_v1 import (
    distributions,
    sample_blocks,
    verify_blocks,
)
from vllm_mtp.integration.logits_processors_v1 import (
    add_bias,
    cut_by_min_p,
    is_plainly_greedy,
    is_plainly_sampled,
)
from vllm_mtp.verification.drawing import draw
from vllm_mtp.verification.likeliest import likeliest_tokens

_STEPS_BETWEEN_LESSONS = 4


class MTPPlusRejectionSampler(RejectionSampler):
    """Left out where there is nothing to reject; block verification where wanted."""

    after_verification: Callable[[torch.Tensor], None] | None = None
    """Called with the sampled token ids, ``[num_reqs, max_sampled]``."""
    drafter: Any = None
    """Ours, where drafts come from a draft vocabulary and may be drawn."""
    tests_blocks = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._steps_to_lesson = 0
        # vLLM's own method, but for the acceptance test that it calls.
        original: Any = RejectionSampler.forward
        names = {**original.__globals__, "rejection_sample": self._verify}
        self._sample_drafts = FunctionType(
            original.__code__, names, "forward", original.__defaults__
        )

    def forward(
        self,
        metadata: Any,
        # [num_draft_tokens, vocab_size], or columns of a draft vocabulary
        draft_probs: torch.Tensor | None,
        # [num_draft_tokens + num_reqs, vocab_size]
        logits: torch.Tensor,
        sampling_metadata: Any,
    ) -> SamplerOutput:
        if metadata.max_spec_len == 0:
            return self.sampler(logits=logits, sampling_metadata=sampling_metadata)
        if is_plainly_greedy(sampling_metadata):
            output = self._compare_drafts(metadata, logits, sampling_metadata)
        elif self.tests_blocks and is_plainly_sampled(sampling_metadata):
            output = self._test_drafts(metadata, draft_probs, logits, sampling_metadata)
        else:
            output = self._sample_drafts(
                self, metadata, draft_probs, logits, sampling_metadata
            )
        if self.after_verification is not None:
            self.after_verification(output.sampled_token_ids)
        return output

    def _compare_drafts(
        self,
        metadata: Any,
        # [num_draft_tokens + num_reqs, vocab_size]
        logits: torch.Tensor,
        sampling_metadata: Any,
    ) -> SamplerOutput:
        """Of greedy requests. vLLM copies every row twice before it looks for the
        likeliest token: 10 of 15 ms for 32 rows of 131,072 tokens on a CPU."""
        choices = likeliest_tokens(logits)
        bonus_token_ids = choices[metadata.bonus_logits_indices].to(torch.int32)
        sampled_token_ids = self._verify(
            metadata.draft_token_ids,
            metadata.num_draft_tokens,
            metadata.max_spec_len,
            metadata.cu_num_draft_tokens,
            None,
            _Choices(choices[metadata.target_logits_indices], logits.shape[1]),
            bonus_token_ids[:, None],
            sampling_metadata,
        )
        return SamplerOutput(sampled_token_ids, logprobs_tensors=None)

    def _test_drafts(
        self,
        metadata: Any,
        # [num_draft_tokens, vocab_size], or columns of a draft vocabulary
        draft_probs: torch.Tensor | None,
        # [num_draft_tokens + num_reqs, vocab_size], changed in place
        logits: torch.Tensor,
        sampling_metadata: Any,
    ) -> SamplerOutput:
        """Of sampled requests. vLLM copies every row two or three times, and makes
        distributions of bonus tokens and of draft tokens apart."""
        lengths = torch.tensor(metadata.num_draft_tokens, device=logits.device)
        target = distributions(logits, lengths + 1, sampling_metadata)
        rows = metadata.target_logits_indices
        if draft_probs is not None:
            self._learn(
                draft_probs,
                lambda few: target[rows[few]],
                metadata.num_draft_tokens,
                sampling_metadata,
            )
            draft_probs = self._whole(draft_probs, target.shape[1])
        uniforms = torch.rand(len(lengths), dtype=torch.float64, device=logits.device)
        bonus_token_ids = draw(target[metadata.bonus_logits_indices], uniforms)
        sampled_token_ids = sample_blocks(
            metadata.draft_token_ids,
            metadata.num_draft_tokens,
            metadata.cu_num_draft_tokens,
            draft_probs,
            target[rows],
            bonus_token_ids,
            sampling_metadata.generators,
        )
        return SamplerOutput(sampled_token_ids, logprobs_tensors=None)

    def apply_logits_processors(
        self,
        # [num_draft_tokens, vocab_size]
        logits: torch.Tensor,
        sampling_metadata: Any,
        metadata: Any,
    ) -> torch.Tensor:
        lengths = metadata.num_draft_tokens
        # Biases add, penalties scale: in the order of vLLM's sampler.
        add_bias(logits, lengths, sampling_metadata)
        logits = super().apply_logits_processors(logits, sampling_metadata, metadata)
        cut_by_min_p(logits, lengths, sampling_metadata)
        return logits

    def _verify(
        self,
        # [num_draft_tokens]
        draft_token_ids: torch.Tensor,
        # of each request
        num_draft_tokens: list[int],
        max_spec_len: int,
        # [num_reqs]
        cu_num_draft_tokens: torch.Tensor,
        # [num_draft_tokens, vocab_size], or columns of a draft vocabulary
        draft_probs: torch.Tensor | None,
        # [num_draft_tokens, vocab_size]
        target_logits: Any,
        # [num_reqs, 1]
        bonus_token_ids: torch.Tensor,
        sampling_metadata: Any,
        **options: Any,
    ) -> torch.Tensor:
        """``[num_reqs, max_spec_len + 1]`` int32, like vLLM's ``rejection_sample``."""
        if draft_probs is not None:
            self._learn(
                draft_probs,
                lambda few: target_logits[few].softmax(dim=-1),
                num_draft_tokens,
                sampling_metadata,
            )
            draft_probs = self._whole(draft_probs, target_logits.shape[1])
        verify = theirs.rejection_sample
        if self.tests_blocks and not sampling_metadata.all_greedy:
            verify = verify_blocks
        return verify(
            draft_token_ids,
            num_draft_tokens,
            max_spec_len,
            cu_num_draft_tokens,
            draft_probs,
            target_logits,
            bonus_token_ids,
            sampling_metadata,
            **options,
        )

    def _whole(self, probs: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """``[num_draft_tokens, vocab_size]``: 0 for what could not be proposed.

        Right until the next draft pass: rows have not moved since the last one.
        """
        if probs.shape[1] == vocab_size:
            return probs
        whole: torch.Tensor = self._vocabulary.spread(probs, 0.0)
        return whole

    @property
    def _vocabulary(self) -> DraftVocabulary:
        """Whose rows the columns of draft probabilities are."""
        vocabulary: DraftVocabulary = self.drafter.draft_vocab.vocabulary
        return vocabulary

    def _learn(
        self,
        draft_probs: torch.Tensor,
        target_of: Callable[[torch.Tensor], torch.Tensor],
        num_draft_tokens: list[int],
        sampling_metadata: Any,
    ) -> None:
        """Let the draft temperature learn from sampled requests, now and then.

        Args:
            draft_probs: ``[num_draft_tokens, rows of the draft vocabulary]``.
            target_of: Distributions of the target for some draft tokens.
            num_draft_tokens: Of each request.
            sampling_metadata: vLLM's, of the batch.
        """
        self._steps_to_lesson -= 1
        if self.drafter is None or self._steps_to_lesson > 0:
            return
        self._steps_to_lesson = _STEPS_BETWEEN_LESSONS
        lengths = torch.tensor(num_draft_tokens, device=draft_probs.device)
        is_sampled = sampling_metadata.temperature[: len(lengths)] > 0
        # No more than are looked at: each is a softmax over the whole vocabulary.
        rows = is_sampled.repeat_interleave(lengths).nonzero()[:MAX_ROWS, 0]
        target = target_of(rows)
        if draft_probs.shape[1] != target.shape[1]:
            target = target[:, self._vocabulary.token_ids]
        self.drafter.draft_temperature.observe(target, draft_probs[rows])


class _Choices:
    """As much of a greedy target's logits as ``rejection_sample`` asks for."""

    ndim = 2

    def __init__(
        self,
        # [num_draft_tokens] int64
        token_ids: torch.Tensor,
        vocab_size: int,
    ) -> None:
        self._token_ids = token_ids
        self.shape, self.device = (len(token_ids), vocab_size), token_ids.device

    def argmax(self, dim: int) -> torch.Tensor:
        """The likeliest token of each row."""
        assert dim == -1
        return self._token_ids
