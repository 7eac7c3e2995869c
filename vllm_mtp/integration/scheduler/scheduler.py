"""vLLM's sync and async schedulers with our controller (`controlled_scheduler`)."""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from vllm_mtp.integration.load.synthetic_acceptance import is_synthetic
from vllm_mtp.integration.scheduler.early_stop import may_stop_early
from vllm_mtp.integration.scheduler.messages import (
    ScoredDraftTokenIds,
    directed,
    report_of,
    warn_lost,
)
from vllm_mtp.integration.scheduler.noting_scheduler import NotingScheduler
from vllm_mtp.integration.scheduler.step_records import StepRecord
from vllm_mtp.integration.worker.draft_sampling import draws_drafts
from vllm_mtp.records import RequestOutcome


class MTPPlusScheduler(NotingScheduler):
    """Sync scheduling: drafts come back to the scheduler between two steps.

    Under a stop rule the worker has the last word on depth and draft lengths.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shadow_drafts: dict[str, int] = {}
        """First draft token of requests that have none verified."""
        self._confidences: dict[str, tuple[float, ...]] = {}
        """Of the draft tokens that came last."""
        self._draws_drafts = draws_drafts(self.vllm_config)
        self._stops_early = may_stop_early(self.vllm_config)
        # What the target samples says nothing of acceptance that is synthetic.
        self._compares_drafts = not is_synthetic(self.vllm_config)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        copying = self._copy_directions
        may_stop = self._stops_early or self._copying is not None
        if copying is None and not (may_stop and output.num_spec_tokens_to_schedule):
            return output
        return directed(output, self._stop_rule, copying)

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
            is_whole = request_id not in self._still_waiting
            if self._compares_drafts and draft and not is_verified and is_whole:
                self._shadow_drafts[request_id] = draft[0]

    def _take_scores(self, drafts: ScoredDraftTokenIds) -> None:
        request_ids = drafts.req_ids
        self._confidences.update(zip(request_ids, drafts.confidences, strict=True))
        if drafts.lengths is not None:
            lengths = self._draft_lengths
            for request_id, length in zip(request_ids, drafts.lengths, strict=True):
                if request_id in lengths:
                    lengths[request_id] = min(lengths[request_id], length)
            self._records.drafted(len(drafts.confidences[0]))

    def _confidences_of(self, request_id: str) -> tuple[float, ...]:
        return self._confidences.get(request_id, ())

    def _scored(self, counts: list[tuple[str, int, int]]) -> list[RequestOutcome]:
        return [
            RequestOutcome(*each, confidences=self._confidences_of(each[0]))
            for each in counts
        ]

    def _add_shadow_drafts(
        self,
        scheduler_output: SchedulerOutput,
        output: ModelRunnerOutput,
        record: StepRecord,
    ) -> None:
        """Whether what was drafted and not verified would have been accepted.

        A draft that was chosen: if the target sampled the same. One that was drawn: if
        it passed the worker's acceptance test.
        """
        verified = scheduler_output.scheduled_spec_decode_tokens
        for request_id, draft_token_id in self._shadow_drafts.items():
            place = output.req_id_to_index.get(request_id)
            if place is None or request_id in verified:
                continue
            sampled = output.sampled_token_ids[place]
            if not sampled:
                continue
            is_accepted: bool | None = int(sampled[0]) == draft_token_id
            if self._draws_drafts and self._traits.is_sampled(request_id):
                is_accepted = report_of(output).shadow_drafts.get(request_id)
            if is_accepted is not None:
                confidences = self._confidences_of(request_id)[:1]
                record.shadow_drafts.append(
                    RequestOutcome(request_id, 1, int(is_accepted), confidences)
                )
        self._shadow_drafts.clear()


class MTPPlusAsyncScheduler(NotingScheduler, AsyncScheduler):
    """Async scheduling: the scheduler only counts drafts, the worker keeps them."""

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        if self._copy_directions is None:
            return output
        return directed(output, None, self._copy_directions)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        depth = scheduler_output.num_spec_tokens_to_schedule
        # Of a large batch hardly any are shorter than what is drafted.
        shorter = [i for i, k in self._draft_lengths.items() if k < depth]
        for request_id in shorter:
            if request_id in scheduler_output.num_scheduled_tokens:
                self._cut_draft(request_id)
