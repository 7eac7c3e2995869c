"""Model Runner V1: drafting ends when the stop rule says so.

vLLM's draft loop makes as many draft steps as its argument says. Those that
do not pay any more run past a closed `DraftModelGate`: they compute nothing, and what
they propose is cut off.
"""

from typing import Any

import torch
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from vllm_mtp.drafting.confidence import confidences_of, take_first_choice
from vllm_mtp.drafting.early_stop import EarlyStop
from vllm_mtp.integration.scheduler.early_stop import may_stop_early
from vllm_mtp.integration.scheduler.messages import ScoredDraftTokenIds
from vllm_mtp.integration.worker.draft_model_gate import DraftModelGate
from vllm_mtp.records import StopRule


class _Drafts:
    """How sure the drafts of one step are, token by token."""

    def __init__(self, stop: EarlyStop | None) -> None:
        self.stop = stop
        # draft steps x [num_reqs]
        self.confidences: list[list[float]] = []

    def note(self, confidences: list[float]) -> None:
        self.confidences.append(confidences)
        if self.stop is not None:
            self.stop.extend(confidences)

    @property
    def are_long_enough(self) -> bool:
        return self.stop is not None and not self.stop.goes_on()


class StopsEarly(SpecDecodeBaseProposer):
    """Mixin of drafters."""

    model_runner: Any
    stops_early = False
    stop_rule: StopRule | None = None
    """Of the step that is under way."""
    gate: DraftModelGate | None
    _last_draft_probs: torch.Tensor | None
    _drafts: _Drafts | None = None
    """Of the last step; None where nobody asks how sure they are."""
    _last_sampled: tuple[torch.Tensor, torch.Tensor | None]

    def prepare_to_stop_early(self) -> None:
        """The weights are loaded."""
        self.stops_early = may_stop_early(self.vllm_config) and self.gate is not None

    @property
    def has_stopped(self) -> bool:
        """The drafts of the step that is under way are long enough."""
        return self.gate is not None and self.gate.is_closed

    def begin_drafts(self, request_ids: list[str]) -> None:
        """The draft loop of a step begins."""
        self._drafts = None
        if not self.stops_early:
            return
        stop = None
        if self.stop_rule is not None:
            sampling = self.model_runner.input_batch.sampling_metadata
            are_drawn = (
                self._enable_probabilistic_draft_probs and not sampling.all_greedy
            )
            stop = EarlyStop(self.stop_rule, request_ids, are_drawn)
        self._drafts = _Drafts(stop)

    def end_drafts(
        self,
        # [num_reqs, num_speculative_tokens]
        draft_token_ids: torch.Tensor,
    ) -> torch.Tensor:
        """The draft tokens that were made before it was closed."""
        if not self.has_stopped:
            return draft_token_ids
        assert self.gate is not None
        assert self._drafts is not None
        self.gate.is_closed = False
        depth = len(self._drafts.confidences)
        if self._last_draft_probs is not None:
            self._last_draft_probs = self._last_draft_probs[:, :depth].contiguous()
        return draft_token_ids[:, :depth]

    def _sample_draft_tokens(
        self, hidden_states: torch.Tensor, sampling_metadata: object
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.has_stopped:
            return self._last_sampled
        sampled = super()._sample_draft_tokens(hidden_states, sampling_metadata)
        if self._drafts is not None and self._drafts.stop is not None:
            self.drafted(sampled[0], self._drafts.stop)
            if self._drafts.are_long_enough:
                assert self.gate is not None
                self.gate.is_closed, self._last_sampled = True, sampled
        return sampled

    def drafted(
        self,
        # [num_reqs]
        draft_token_ids: torch.Tensor,
        stop: EarlyStop,
    ) -> None:
        """A draft step under a rule has been made."""

    def _update_positions_dependent_metadata(
        self, positions: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if self.has_stopped:  # no further slots are written
            return positions
        return super()._update_positions_dependent_metadata(positions, *args, **kwargs)

    def _greedy_sample(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self._drafts is None:
            return super()._greedy_sample(hidden_states)
        logits = self.model.compute_logits(hidden_states)
        token_ids, confidences = take_first_choice(logits)
        self._drafts.note(confidences)
        return token_ids

    def _sample_from_logits(
        self, logits: torch.Tensor, sampling_metadata: object
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._drafts is not None:
            self._drafts.note(confidences_of(logits))
        return super()._sample_from_logits(logits, sampling_metadata)

    def scored(self, taken: DraftTokenIds | None) -> DraftTokenIds | None:
        """Drafts that go to the scheduler, with how sure they are."""
        drafts, self._drafts = self._drafts, None
        if taken is None or drafts is None:
            return taken
        return ScoredDraftTokenIds(
            taken.req_ids,
            taken.draft_token_ids,
            list(zip(*drafts.confidences, strict=True)),
            None if drafts.stop is None else drafts.stop.lengths(),
        )
