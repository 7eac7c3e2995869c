"""vLLM's sync and async schedulers with our controller (`controlled_scheduler`)."""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from vllm_mtp.integration.scheduler.controlled_scheduler import ControlledScheduler
from vllm_mtp.integration.scheduler.early_stop import (
    ScoredDraftTokenIds,
    directed,
    may_stop_early,
)
from vllm_mtp.integration.scheduler.messages import warn_lost
from vllm_mtp.integration.scheduler.vocabulary_news import verdicts_of
from vllm_mtp.integration.worker.draft_sampling import draws_drafts
from vllm_mtp.records import RequestOutcome, StepOutcome


class MTPPlusScheduler(ControlledScheduler):
    """Sync scheduling: drafts come back to the scheduler between two steps.

    Under a stop rule the worker has the last word on depth and draft lengths, and how
    deep it drafted is known only when the drafts come: the step's outcome waits.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._not_verified: dict[str, int] = {}
        """First draft token of requests that have none verified."""
        self._confidences: dict[str, tuple[float, ...]] = {}
        """Of the draft tokens that came last."""
        self._waiting_outcome: StepOutcome | None = None
        self._draws_drafts = draws_drafts(self.vllm_config)
        self._stops_early = may_stop_early(self.vllm_config)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._hear_with_depth(None)
        output = super().schedule(*args, **kwargs)
        if not (self._stops_early and output.num_spec_tokens_to_schedule):
            return output
        return directed(output, self._stop_rule)

    def _hear(self, outcome: StepOutcome) -> None:
        if self._stop_rule is None:
            super()._hear(outcome)
        else:
            self._waiting_outcome = outcome

    def _hear_with_depth(self, depth: int | None) -> None:
        outcome, self._waiting_outcome = self._waiting_outcome, None
        if outcome is not None:
            known = outcome if depth is None else outcome._replace(draft_depth=depth)
            super()._hear(known)

    def _confidences_of(self, request_id: str) -> tuple[float, ...]:
        return self._confidences.get(request_id, ())

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        super().update_draft_token_ids(draft_token_ids)
        self._confidences.clear()
        if isinstance(draft_token_ids, ScoredDraftTokenIds):
            self._take_scores(draft_token_ids)
        elif self._stops_early and any(draft_token_ids.draft_token_ids):
            warn_lost(ScoredDraftTokenIds)
        for request_id in draft_token_ids.req_ids:
            draft = self._cut_draft(request_id)
            is_verified = self._draft_lengths.get(request_id, 0) > 0
            # Made without all of its KV a draft says nothing.
            if draft and not is_verified and request_id not in self._still_waiting:
                self._not_verified[request_id] = draft[0]

    def _is_drawn(self, request_id: str) -> bool:
        traits = self._traits.get(request_id)
        return self._draws_drafts and (traits is None or not traits.is_greedy)

    def _take_scores(self, drafts: ScoredDraftTokenIds) -> None:
        request_ids = drafts.req_ids
        self._confidences.update(zip(request_ids, drafts.confidences, strict=True))
        if drafts.lengths is not None:
            lengths = self._draft_lengths
            for request_id, length in zip(request_ids, drafts.lengths, strict=True):
                if request_id in lengths:
                    lengths[request_id] = min(lengths[request_id], length)
            self._hear_with_depth(len(drafts.confidences[0]))

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
    ) -> Any:
        if self._not_verified:
            self._compare(scheduler_output, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _compare(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
    ) -> None:
        """Whether what was drafted and not verified would have been accepted.

        A draft that was chosen: if the target sampled the same. One that was drawn: if
        the worker says so.
        """
        index = model_runner_output.req_id_to_index
        verified = scheduler_output.scheduled_spec_decode_tokens
        verdicts = verdicts_of(model_runner_output)
        for request_id, draft_token_id in self._not_verified.items():
            if request_id not in index or request_id in verified:
                continue
            sampled = model_runner_output.sampled_token_ids[index[request_id]]
            if not sampled:
                continue
            is_accepted: bool | None = int(sampled[0]) == draft_token_id
            if self._is_drawn(request_id):
                is_accepted = verdicts.get(request_id)
            if is_accepted is not None:
                self._outcomes.add_compared(
                    RequestOutcome(
                        request_id,
                        1,
                        int(is_accepted),
                        self._confidences_of(request_id)[:1],
                    )
                )
        self._not_verified.clear()


class MTPPlusAsyncScheduler(ControlledScheduler, AsyncScheduler):
    """Async scheduling: the scheduler only counts drafts, the worker keeps them."""

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        if not scheduler_output.num_spec_tokens_to_schedule:
            return
        for request_id in scheduler_output.num_scheduled_tokens:
            self._cut_draft(request_id)
