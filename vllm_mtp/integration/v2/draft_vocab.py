"""Model Runner V2: drafts from the draft vocabulary.

Where drafts are sampled vLLM's kernels keep, and verify against, logits of the whole
vocabulary, so there the draft logits are spread out over it at once.
"""

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_mtp.integration.draft_vocab.policy import VocabularyDrafting


class DraftsFromVocabulary(DraftModelSpeculator):
    """Mixin of speculators."""

    draft_vocab: VocabularyDrafting | None = None
    """None before weights are loaded."""

    def load_model(self, target_model: Any) -> None:
        super().load_model(target_model)
        self.draft_vocab = VocabularyDrafting(self.vllm_config, self.device)
        self.draft_vocab.install(self.model)
        if self.draft_vocab.reduces_top_tokens and self.draft_logits is None:
            self.use_local_argmax_reduction = True

    def propose(
        self, *args: Any, dummy_run: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        if self.draft_vocab is not None and not dummy_run:
            self.draft_vocab.begin_pass()
        return super().propose(*args, dummy_run=dummy_run, **kwargs)

    def compute_draft_logits(
        self, hidden_states: torch.Tensor, spec_step_idx: int
    ) -> torch.Tensor:
        logits = super().compute_draft_logits(hidden_states, spec_step_idx)
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
        if self.draft_logits is not None or self.draft_vocab is None:
            return choices
        return self.draft_vocab.to_target(choices)


def follow_tokens(runner: Any, speculator: DraftsFromVocabulary) -> None:
    """Let a speculator know what is committed, and the prompts that come.

    Args:
        runner: vLLM's V2 model runner.
        speculator: ours, already in its place.
    """
    execute_model, sample = runner.execute_model, runner.sample

    def execute_model_and_tell(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if speculator.draft_vocab is not None:
            speculator.draft_vocab.expect_requests(scheduler_output.scheduled_new_reqs)
        return execute_model(scheduler_output, *args, **kwargs)

    def sample_and_tell(*args: Any, **kwargs: Any) -> Any:
        result = output, num_sampled, _ = sample(*args, **kwargs)
        if speculator.draft_vocab is not None:
            speculator.draft_vocab.observe(output.sampled_token_ids, num_sampled)
        return result

    runner.execute_model = execute_model_and_tell
    runner.sample = sample_and_tell
