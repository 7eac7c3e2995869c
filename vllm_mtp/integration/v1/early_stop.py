"""Model Runner V1: the draft loop ends when the stop rule says so.

vLLM's loop makes as many draft steps as it was told at its beginning. It is left by an
exception, at the place where the next draft step would begin: nothing of that step has
happened yet, and all that the loop would have returned is known.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from vllm_mtp.drafting.confidence import confidences_of, take_first_choice
from vllm_mtp.drafting.early_stop import EarlyStop
from vllm_mtp.integration.scheduler.early_stop import (
    ScoredDraftTokenIds,
    may_stop_early,
)
from vllm_mtp.records import StopRule


class _LongEnough(Exception):
    """No further draft step pays."""


class _Drafts:
    """The drafts of one step, token by token."""

    def __init__(self, stop: EarlyStop | None) -> None:
        self.stop = stop
        self.is_long_enough = False
        # draft steps x [num_reqs]
        self.confidences: list[list[float]] = []
        self.token_ids: list[torch.Tensor] = []
        # draft steps x [num_reqs, vocab_size]; empty where drafts are greedy
        self.probs: list[torch.Tensor] = []

    def note(self, confidences: list[float]) -> None:
        self.confidences.append(confidences)
        if self.stop is not None:
            self.is_long_enough = not self.stop.goes_on(confidences)


class StopsEarly(SpecDecodeBaseProposer):
    """Mixin of drafters."""

    stops_early = False
    stop_rule: StopRule | None = None
    """Of the step that is under way."""
    drafts: _Drafts | None = None
    """Of the last step; None where nobody asks how sure they are."""
    model_runner: Any

    def prepare_to_stop_early(self) -> None:
        self.stops_early = may_stop_early(self.vllm_config)

    def propose(self, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> Any:
        if not (self.stops_early and num_speculative_tokens):
            return super().propose(num_speculative_tokens, *args, **kwargs)
        rule, request_ids = self.stop_rule, self.model_runner.input_batch.req_ids
        stop = None
        if rule is not None:
            are_drawn = self._enable_probabilistic_draft_probs
            stop = EarlyStop(rule, request_ids, are_drawn)
        self.drafts = drafts = _Drafts(stop)
        try:
            return super().propose(num_speculative_tokens, *args, **kwargs)
        except _LongEnough:
            if drafts.probs:
                self._last_draft_probs = torch.stack(drafts.probs, dim=1).contiguous()
            return torch.stack(drafts.token_ids, dim=1)

    def _sample_draft_tokens(
        self, hidden_states: torch.Tensor, sampling_metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        token_ids, probs = super()._sample_draft_tokens(
            hidden_states, sampling_metadata
        )
        if self.drafts is not None:
            self.drafts.token_ids.append(token_ids)
            if probs is not None:
                self.drafts.probs.append(probs)
        return token_ids, probs

    def _greedy_sample(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.drafts is None:
            return super()._greedy_sample(hidden_states)
        logits = self.model.compute_logits(hidden_states)
        token_ids, confidences = take_first_choice(logits)
        self.drafts.note(confidences)
        return token_ids

    def _sample_from_logits(
        self, logits: torch.Tensor, sampling_metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.drafts is not None:
            self.drafts.note(confidences_of(logits))
        return super()._sample_from_logits(logits, sampling_metadata)

    def _update_positions_dependent_metadata(
        self, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if self.drafts is not None and self.drafts.is_long_enough:
            raise _LongEnough
        return super()._update_positions_dependent_metadata(*args, **kwargs)


def score_drafts(runner: Any, drafter: StopsEarly) -> None:
    """Let drafts that go to the scheduler tell how sure they are.

    Args:
        runner: vLLM's V1 model runner.
        drafter: ours, already in its place.
    """
    original: Callable[[], DraftTokenIds | None] = runner.take_draft_token_ids

    def take_draft_token_ids() -> DraftTokenIds | None:
        taken, drafts = original(), drafter.drafts
        drafter.drafts = None
        if taken is None or drafts is None:
            return taken
        return ScoredDraftTokenIds(
            taken.req_ids,
            taken.draft_token_ids,
            list(zip(*drafts.confidences, strict=True)),
            None if drafts.stop is None else drafts.stop.lengths(),
        )

    runner.take_draft_token_ids = take_draft_token_ids
