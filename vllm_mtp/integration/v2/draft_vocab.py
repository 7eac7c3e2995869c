"""Model Runner V2: drafts from the draft vocabulary.

Where drafts are drawn their proposals are kept with as many columns (`proposals`).
Where texts are watermarked vLLM keeps them, of the whole vocabulary: there draft logits
are spread out over it at once.
"""

from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_mtp.integration.draft_vocab.policy import VocabularyDrafting
from vllm_mtp.integration.scheduler.messages import WorkerReport
from vllm_mtp.integration.v2.proposals import Proposals
from vllm_mtp.integration.worker.draft_sampling import draws_drafts, keeps_own_proposals
from vllm_mtp.integration.worker.weight_updates import FollowsWeights, tensors_of


class DraftsFromVocabulary(FollowsWeights, DraftModelSpeculator):
    """Mixin of speculators."""

    draft_vocab: VocabularyDrafting | None = None
    """None before weights are loaded."""
    proposals: Proposals | None = None
    """Where drafts are drawn, once weights are loaded."""
    model_runner: Any

    def load_model(self, target_model: Any) -> None:
        super().load_model(target_model)
        self.draft_vocab = VocabularyDrafting(self.vllm_config, self.device)
        self.draft_vocab.install(self.model)
        if draws_drafts(self.vllm_config) and keeps_own_proposals(self.vllm_config):
            self.proposals = Proposals(
                (self.max_num_reqs, self.num_speculative_steps),
                self.vocab_size,
                self.draft_vocab.vocabulary,
                self.draft_logits_spec(self.vllm_config)[0],
                self.device,
            )
            self.draft_logits = self.proposals.logits
        if self.draft_vocab.reduces_top_tokens and self.draft_logits is None:
            self.use_local_argmax_reduction = True

    def lasting_tensors(self) -> Iterator[torch.Tensor]:
        """What was learned, beside weights; proposals come with the next requests."""
        yield from super().lasting_tensors()
        yield from tensors_of(self.acceptance_estimator)

    def begin_drafts(self, batch: Any) -> None:
        """A step drafts: rows of the vocabulary may move now.

        Args:
            batch: vLLM's ``InputBatch``.
        """
        if self.draft_vocab is not None:
            self.draft_vocab.begin_pass()
        if self.proposals is not None:
            states = self.model_runner.sampler.sampling_states
            self.proposals.begin_pass(states, batch.idx_mapping_np)

    def expect(self, scheduler_output: Any) -> None:
        """A step is about to run, some requests of it for the first time."""
        if self.draft_vocab is not None:
            self.draft_vocab.expect_requests(scheduler_output.scheduled_new_reqs)

    def commit(
        self,
        # [num_reqs, max_sampled]
        sampled_token_ids: torch.Tensor,
        # [num_reqs or more]
        num_sampled: torch.Tensor,
    ) -> None:
        """A step has sampled these tokens."""
        if self.draft_vocab is not None:
            self.draft_vocab.observe(sampled_token_ids, num_sampled)

    def take_report(self) -> WorkerReport:
        state = None if self.draft_vocab is None else self.draft_vocab.take_state()
        return super().take_report()._replace(vocabulary=state)

    def compute_draft_logits(
        self, hidden_states: torch.Tensor, spec_step_idx: int
    ) -> torch.Tensor:
        logits = super().compute_draft_logits(hidden_states, spec_step_idx)
        if self.proposals is not None:
            requests = self.idx_mapping[: len(logits)]
            self.proposals.truncate(logits, requests, self.temperature)
            return logits
        if self.draft_logits is None or self.draft_vocab is None:
            return logits
        return self.draft_vocab.whole_logits(logits, self.vocab_size)

    def get_draft_top_tokens(
        self, hidden_states: torch.Tensor, spec_step_idx: int
    ) -> torch.Tensor:
        drafting = self.draft_vocab
        if drafting is None or not drafting.reduces_top_tokens:
            return super().get_draft_top_tokens(hidden_states, spec_step_idx)
        with drafting.top_tokens():
            return super().compute_draft_logits(hidden_states, spec_step_idx)

    def sample_draft(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        choices = super().sample_draft(*args, **kwargs)
        is_whole = self.draft_logits is not None and self.proposals is None
        if is_whole or self.draft_vocab is None:
            return choices
        return self.draft_vocab.to_target(choices)
