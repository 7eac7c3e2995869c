"""Model Runner V1: drafts from the draft vocabulary."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig, replace
from vllm.platforms import current_platform
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from vllm_mtp.integration.cpu.int8_drafts import rounds_drafts
from vllm_mtp.integration.cpu.int8_weights import RoundedDrafts, round_plain_layers
from vllm_mtp.integration.draft_vocab.policy import VocabularyDrafting
from vllm_mtp.integration.v1.draft_constraints import DraftConstraints
from vllm_mtp.integration.v1.draft_grammars import DraftGrammars, may_mask_drafts
from vllm_mtp.integration.v1.shadow_drafts import DraftJudge


class DraftsFromVocabulary(SpecDecodeBaseProposer):
    """Mixin of drafters, in front of those that choose draft tokens."""

    draft_vocab: VocabularyDrafting | None = None
    """None before weights are loaded."""
    judge: DraftJudge | None = None
    """Of drafts that are drawn; None where all are chosen."""
    hears_later: bool
    model_runner: Any
    surviving: Any
    """Of `drafting_failure.SurvivesFailure`."""

    def _create_draft_vllm_config(self) -> VllmConfig:
        config = super()._create_draft_vllm_config()
        if rounds_drafts(self.vllm_config):
            config = replace(config, quant_config=RoundedDrafts())
        return config

    def load_model(self, target_model: Any) -> None:
        super().load_model(target_model)
        if rounds_drafts(self.vllm_config):
            round_plain_layers(self.model)
        self.draft_vocab = VocabularyDrafting(self.vllm_config, self.device)
        self.draft_vocab.install(self.model)
        model_config = self.vllm_config.model_config
        self.draft_vocab.constraints = DraftConstraints(
            model_config.get_vocab_size(),
            current_platform.is_cpu() or model_config.enforce_eager,
        )
        if may_mask_drafts(self.vllm_config):
            self.draft_vocab.grammars = DraftGrammars(self.vllm_config)

    def expect(self, scheduler_output: Any) -> None:
        """These requests are about to run for the first time."""
        assert self.draft_vocab is not None
        new_requests = scheduler_output.scheduled_new_reqs
        self.draft_vocab.expect_requests(new_requests)
        if (grammars := self.draft_vocab.grammars) is not None:
            grammars.meet(new_requests, scheduler_output.finished_req_ids)

    def hear(
        self,
        request_ids: Sequence[str],
        # [num_requests, max_sampled], -1 where there is none
        committed: torch.Tensor,
    ) -> None:
        """A step has committed these tokens."""
        drafting = self.draft_vocab
        if drafting is None:
            return
        drafting.observe(committed)
        if drafting.constraints is not None:
            drafting.constraints.commit(committed)
        if drafting.grammars is not None:
            drafting.grammars.commit(request_ids, committed)

    @property
    def num_draft_columns(self) -> int:
        assert self.draft_vocab is not None
        if self.draft_vocab.is_active and self.draft_vocab.vocabulary is not None:
            return self.draft_vocab.vocabulary.num_rows
        return int(self.draft_model_config.get_vocab_size())

    def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafting = self.draft_vocab
        assert drafting is not None
        drafting.begin_pass()
        drafting.constraints.begin_pass(kwargs.get("sampling_metadata"))
        if drafting.grammars is not None:
            drafting.grammars.begin_pass(self.model_runner.input_batch.req_ids)
        if self.judge is not None:
            self.judge.begin_pass(self.model_runner.input_batch.req_ids)
        try:
            return super().propose(*args, **kwargs)
        finally:
            drafting.constraints.end_pass()
            if drafting.grammars is not None:
                drafting.grammars.end_pass()

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
        if self.judge is not None and probs is not None:
            chances = probs.gather(1, choices[:, None].long())[:, 0]
            self.judge.drawn(draft_token_ids, chances)
        return draft_token_ids, probs

    def _taken(
        self,
        # [num_requests] int64
        draft_token_ids: torch.Tensor,
    ) -> torch.Tensor:
        """The same, after those have heard of them who follow the draft."""
        if self.draft_vocab is not None and self.draft_vocab.constraints is not None:
            self.draft_vocab.constraints.take(draft_token_ids)
            if self.draft_vocab.grammars is not None:
                self.draft_vocab.grammars.take(draft_token_ids)
        return draft_token_ids


def follow_tokens(runner: Any, drafter: DraftsFromVocabulary) -> None:
    """Let a drafter know what is committed, and the prompts that come.

    Args:
        runner: vLLM's V1 model runner.
        drafter: ours, already in its place.
    """
    execute_model, sample = runner.execute_model, runner._sample

    def execute_model_and_tell(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if drafter.draft_vocab is not None:
            with drafter.surviving():
                drafter.expect(scheduler_output)
        return execute_model(scheduler_output, *args, **kwargs)

    def sample_and_tell(*args: Any, **kwargs: Any) -> Any:
        output = sample(*args, **kwargs)
        if not drafter.hears_later:
            committed = output.sampled_token_ids
            num_requests = committed.shape[0]
            # Counting is one call in C; `any` takes as long as sampling does.
            if np.count_nonzero(runner.discard_request_mask.np[:num_requests]):
                discarded = runner.discard_request_mask.gpu[:num_requests]
                committed = committed.masked_fill(discarded[:, None], -1)
            with drafter.surviving():
                drafter.hear(runner.input_batch.req_ids, committed)
        return output

    runner.execute_model = execute_model_and_tell
    runner._sample = sample_and_tell
