"""Model Runner V1: drafts from the draft vocabulary."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig, replace
from vllm.platforms import current_platform
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from vllm_mtp.integration.cpu.int8_drafts import drafts_in_int8
from vllm_mtp.integration.cpu.int8_weights import (
    Int8DraftWeights,
    quantize_plain_layers,
    restore_plain_layers,
)
from vllm_mtp.integration.draft_vocab.policy import VocabularyDrafting
from vllm_mtp.integration.scheduler.messages import WorkerReport
from vllm_mtp.integration.v1.draft_constraints import DraftConstraints
from vllm_mtp.integration.v1.draft_grammars import DraftGrammars, may_mask_drafts
from vllm_mtp.integration.v1.shadow_drafts import ShadowTest
from vllm_mtp.integration.worker.weight_updates import FollowsWeights


class DraftsFromVocabulary(FollowsWeights, SpecDecodeBaseProposer):
    """Mixin of drafters, in front of those that choose draft tokens."""

    draft_vocab: VocabularyDrafting | None = None
    """None before weights are loaded."""
    shadow_test: ShadowTest | None = None
    """Of drafts that are drawn; None where all are chosen."""
    model_runner: Any

    def _create_draft_vllm_config(self) -> VllmConfig:
        config = super()._create_draft_vllm_config()
        if drafts_in_int8(self.vllm_config):
            config = replace(config, quant_config=Int8DraftWeights())
        return config

    def load_model(self, target_model: Any) -> None:
        super().load_model(target_model)
        if drafts_in_int8(self.vllm_config):
            quantize_plain_layers(self.model)
        self.draft_vocab = VocabularyDrafting(self.vllm_config, self.device)
        self.draft_vocab.install(self.model)
        model_config = self.vllm_config.model_config
        self.draft_vocab.constraints = DraftConstraints(
            model_config.get_vocab_size(),
            current_platform.is_cpu() or model_config.enforce_eager,
        )
        if may_mask_drafts(self.vllm_config):
            self.draft_vocab.grammars = DraftGrammars(self.vllm_config)

    @contextmanager
    def plain_weights(self) -> Iterator[None]:
        """The draft model takes the weights of a checkpoint in here."""
        rounded = drafts_in_int8(self.vllm_config)
        if rounded:
            restore_plain_layers(self.model)
        yield
        if rounded:
            quantize_plain_layers(self.model)

    def expect(self, scheduler_output: Any) -> None:
        """A step is about to run, some requests of it for the first time."""
        if self.draft_vocab is None:
            return
        with self.surviving():
            new_requests = scheduler_output.scheduled_new_reqs
            self.draft_vocab.expect_requests(new_requests)
            if (grammars := self.draft_vocab.grammars) is not None:
                grammars.meet(new_requests, scheduler_output.finished_req_ids)

    @contextmanager
    def sampling(self, spec_decode_metadata: Any) -> Iterator[None]:
        """The tokens of a step are sampled in here."""
        if self.shadow_test is None:
            yield
            return
        metadata = spec_decode_metadata
        self.shadow_test.open(metadata is None or metadata.max_spec_len == 0)
        try:
            yield
        finally:
            self.shadow_test.close()

    def commit(
        self,
        # [num_reqs, max_sampled], -1 where there is none
        sampled_token_ids: torch.Tensor,
    ) -> None:
        """A step has sampled these tokens; those of discarded rows do not count."""
        drafting = self.draft_vocab
        if drafting is None:
            return
        num_reqs = sampled_token_ids.shape[0]
        discarded = self.model_runner.discard_request_mask
        committed = sampled_token_ids
        # Counting is one call in C; `any` takes as long as sampling does.
        if np.count_nonzero(discarded.np[:num_reqs]):
            committed = committed.masked_fill(discarded.gpu[:num_reqs, None], -1)
        with self.surviving():
            drafting.observe(committed)
            if drafting.constraints is not None:
                drafting.constraints.commit(committed)
            if drafting.grammars is not None:
                drafting.grammars.commit(
                    self.model_runner.input_batch.req_ids, committed
                )

    @property
    def num_draft_columns(self) -> int:
        assert self.draft_vocab is not None
        if self.draft_vocab.is_active and self.draft_vocab.vocabulary is not None:
            return self.draft_vocab.vocabulary.num_rows
        return int(self.draft_model_config.get_vocab_size())

    @contextmanager
    def draft_pass(self, given: dict[str, Any]) -> Iterator[None]:
        """Drafts of a step are made in here.

        Args:
            given: Arguments of ``propose``.
        """
        drafting, request_ids = self.draft_vocab, self.model_runner.input_batch.req_ids
        assert drafting is not None
        drafting.begin_pass()
        drafting.constraints.begin_pass(given.get("sampling_metadata"))
        if drafting.grammars is not None:
            drafting.grammars.begin_pass(request_ids)
        if self.shadow_test is not None:
            self.shadow_test.begin_pass(request_ids)
        try:
            yield
        finally:
            drafting.constraints.end_pass()
            if drafting.grammars is not None:
                drafting.grammars.end_pass()

    def take_report(self) -> WorkerReport:
        vocabulary = None if self.draft_vocab is None else self.draft_vocab.take_state()
        return (
            super()
            .take_report()
            ._replace(
                vocabulary=vocabulary,
                shadow_drafts=self.shadow_test.take() if self.shadow_test else {},
            )
        )

    def _greedy_sample(self, hidden_states: torch.Tensor) -> torch.Tensor:
        drafting = self.draft_vocab
        assert drafting is not None
        if drafting.reduces_top_tokens and not drafting.constraints.are_needed:
            with drafting.top_tokens():
                choices = self.model.compute_logits(hidden_states)
        else:
            choices = super()._greedy_sample(hidden_states)
        return self._taken(drafting.to_target(choices))

    def _sample_from_logits(
        self, logits: torch.Tensor, sampling_metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Token ids, and probabilities of the draft vocabulary's rows."""
        assert self.draft_vocab is not None
        choices, probs = super()._sample_from_logits(logits, sampling_metadata)
        draft_token_ids = self._taken(self.draft_vocab.to_target(choices))
        if self.shadow_test is not None and probs is not None:
            chances = probs.gather(1, choices[:, None].long())[:, 0]
            self.shadow_test.drawn(draft_token_ids, chances)
        return draft_token_ids, probs

    def _taken(
        self,
        # [num_requests] int64
        draft_token_ids: torch.Tensor,
    ) -> torch.Tensor:
        """The same, noted by what follows the draft."""
        if self.draft_vocab is not None and self.draft_vocab.constraints is not None:
            self.draft_vocab.constraints.take(draft_token_ids)
            if self.draft_vocab.grammars is not None:
                self.draft_vocab.grammars.take(draft_token_ids)
        return draft_token_ids
