"""Model Runner V1: vLLM's rejection sampler, with more than one acceptance test."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample import rejection_sampler as theirs
from vllm.v1.sample.rejection_sampler import RejectionSampler

from vllm_mtp.drafting.temperature import MAX_ROWS
from vllm_mtp.drafting.vocabulary import DraftVocabulary
from vllm_mtp.integration.v1.block_verification import (
    distributions,
    sample_blocks,
    verify_blocks,
)
from vllm_mtp.integration.v1.copied_rows import CopiedRows
from vllm_mtp.integration.v1.listed_logprobs import gather_logprobs
from vllm_mtp.integration.v1.logits_processors import (
    count_tokens,
    is_plainly_greedy,
    is_plainly_sampled,
)
from vllm_mtp.integration.v1.synthetic_acceptance import accept_by_chance
from vllm_mtp.integration.v1.truncation import truncate
from vllm_mtp.integration.v1.verified_rows import verified_rows
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
        self._copied: CopiedRows | None = None
        """Of the step that is verified."""

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
        self._copied = CopiedRows.taken_from(draft_probs, metadata.draft_token_ids)
        count_tokens(sampling_metadata)
        if is_plainly_greedy(sampling_metadata):
            choices = likeliest_tokens(logits)
            output = SamplerOutput(
                self._compare_drafts(metadata, choices, logits, sampling_metadata), None
            )
        elif self.tests_blocks and is_plainly_sampled(sampling_metadata):
            output = self._test_drafts(metadata, draft_probs, logits, sampling_metadata)
        else:
            output = self._verify_rows(metadata, draft_probs, logits, sampling_metadata)
        if self.after_verification is not None:
            self.after_verification(output.sampled_token_ids)
        return output

    def _verify_rows(
        self,
        metadata: Any,
        # [num_draft_tokens, vocab_size], or columns of a draft vocabulary
        draft_probs: torch.Tensor | None,
        # [num_draft_tokens + num_reqs, vocab_size]
        logits: torch.Tensor,
        sampling_metadata: Any,
    ) -> SamplerOutput:
        """Of any requests: what vLLM's sampler does to a request, done to each row."""
        given, sampler = sampling_metadata, self.sampler
        rows = verified_rows(metadata, given)
        processed = sampler.apply_logits_processors(
            logits.to(torch.float32, copy=True), rows.sampling, False
        )
        if given.all_greedy:
            choices = sampler.greedy_sample(processed)
            token_ids = self._compare_drafts(metadata, choices, processed, given)
        else:
            bonus = processed[metadata.bonus_logits_indices]
            bonus_token_ids = sampler.sample(bonus, given)[0].to(torch.int32)[:, None]
            processed = _constrained(sampler, processed, rows.sampling)
            token_ids = bonus_token_ids
            if metadata.max_spec_len:
                token_ids = self._verify(
                    metadata.draft_token_ids,
                    metadata.num_draft_tokens,
                    metadata.max_spec_len,
                    metadata.cu_num_draft_tokens,
                    draft_probs,
                    processed[metadata.target_logits_indices],
                    bonus_token_ids,
                    given,
                )
        final = processed if self.is_processed_logprobs_mode else logits.float()
        return SamplerOutput(
            token_ids, self._logprobs(final, rows.starts, token_ids, given)
        )

    def _logprobs(
        self,
        # [num_draft_tokens + num_reqs, vocab_size]
        logits: torch.Tensor,
        # first row of each request, and the number of rows
        starts: Sequence[int],
        # [num_reqs, max_sampled], -1 where there is none
        token_ids: torch.Tensor,
        sampling_metadata: Any,
    ) -> LogprobsTensors | None:
        """Of each place of ``token_ids``, one after the other."""
        given, width = sampling_metadata, token_ids.shape[1]
        if given.max_num_logprobs is None and not given.logprob_token_ids:
            return None
        places = torch.tensor(starts[:-1], device=logits.device)[:, None]
        places = places + torch.arange(width, device=logits.device)
        values = logits[places.flatten().clamp(max=len(logits) - 1)]
        if not self.is_logits_logprobs_mode:
            values = self.sampler.compute_logprobs(values)
        ids = {
            request * width + position: asked
            for request, asked in (given.logprob_token_ids or {}).items()
            for position in range(width)
        }
        return gather_logprobs(
            values, token_ids.flatten().clamp(min=0).long(), given.max_num_logprobs, ids
        )

    def _compare_drafts(
        self,
        metadata: Any,
        # [num_draft_tokens + num_reqs]
        choices: torch.Tensor,
        # [num_draft_tokens + num_reqs, vocab_size]
        logits: torch.Tensor,
        sampling_metadata: Any,
    ) -> torch.Tensor:
        """``[num_reqs, max_spec_len + 1]`` int32, of greedy requests.

        vLLM copies every row twice before it looks for the likeliest token: 10 of 15 ms
        for 32 rows of 131,072 tokens on a CPU.
        """
        bonus = choices[metadata.bonus_logits_indices].to(torch.int32)
        if not metadata.max_spec_len:
            return bonus[:, None]
        return self._verify(
            metadata.draft_token_ids,
            metadata.num_draft_tokens,
            metadata.max_spec_len,
            metadata.cu_num_draft_tokens,
            None,
            _Choices(choices[metadata.target_logits_indices], logits.shape[1]),
            bonus[:, None],
            sampling_metadata,
        )

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
        if self.synthetic_mode and target_logits.device.type == "cpu":
            verify = accept_by_chance
        elif self.tests_blocks and not sampling_metadata.all_greedy:
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
            synthetic_mode=self.synthetic_mode,
            synthetic_conditional_rates=self.synthetic_conditional_rates,
            use_fp64_gumbel=self.use_fp64_gumbel,
        )

    def _whole(self, probs: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """``[num_draft_tokens, vocab_size]``: 0 for what could not be proposed.

        Right until the next draft pass: rows have not moved since the last one.
        """
        if probs.shape[1] != vocab_size:
            probs = self._vocabulary.spread(probs, 0.0)
        if self._copied is not None:
            self._copied.propose_for_sure(probs)
        return probs

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
        is_drawn = is_sampled.repeat_interleave(lengths)
        if self._copied is not None:
            self._copied.without(is_drawn)
        # No more than are looked at: each is a softmax over the whole vocabulary.
        rows = is_drawn.nonzero()[:MAX_ROWS, 0]
        target = target_of(rows)
        if draft_probs.shape[1] != target.shape[1]:
            target = target[:, self._vocabulary.token_ids]
        self.drafter.draft_temperature.observe(target, draft_probs[rows])


def _constrained(
    sampler: Any,
    # [num_rows, vocab_size], changed in place
    logits: torch.Tensor,
    # of the rows, not all of them greedy
    sampling_metadata: Any,
) -> torch.Tensor:
    """Logits of what rows are sampled from, as in vLLM's ``Sampler.sample``."""
    given = sampling_metadata
    logits = sampler.apply_temperature(logits, given.temperature, given.all_random)
    for processor in given.logitsprocs.argmax_invariant:
        logits = processor.apply(logits)
    return truncate(logits, given.top_k, given.top_p)


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
