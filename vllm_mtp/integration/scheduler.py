"""The schedulers: vLLM's own, plus a controller that decides K and sees every outcome.

Life of a decision: ``_update_after_schedule`` closes a step, so there the controller
chooses how deep the worker drafts at the end of this step (``draft_depth``) and how
many of those tokens each request will have verified in the next one. The draft tokens
beyond a request's own K are cut before vLLM schedules them: in the sync scheduler when
they arrive, in the async one from the placeholders that stand for them.
"""

import time
from collections import deque
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from vllm_mtp.control.controller import Controller
from vllm_mtp.control.factory import make_controller
from vllm_mtp.integration.settings import settings_of
from vllm_mtp.records import DecodeRequest, RequestOutcome, StepOutcome


class _ControlledScheduler(Scheduler):
    """What the sync and the async scheduler have in common."""

    controller: Controller

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.controller = make_controller(
            settings_of(self.vllm_config), self.num_spec_tokens
        )
        self._draft_lengths: dict[str, int] = {}
        self._request_outcomes: list[RequestOutcome] = []
        self._step_started_at_s: deque[float] = deque()
        self._last_output_at_s = 0.0

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        if scheduler_output.total_num_scheduled_tokens:
            self._step_started_at_s.append(time.monotonic())
        for request_id in scheduler_output.finished_req_ids:
            self._draft_lengths.pop(request_id, None)
        scheduler_output.num_spec_tokens_to_schedule = self._decide(scheduler_output)
        super()._update_after_schedule(scheduler_output)

    def _decide(self, scheduler_output: SchedulerOutput) -> int:
        """Ask the controller; returns the draft depth of this step."""
        decoding = self._requests_that_will_decode(scheduler_output)
        # Nobody would use the drafts of a step that only prefills. Ranks of a
        # data-parallel engine must draft equally deep, whatever their own batch.
        if not decoding and self.parallel_config.data_parallel_size == 1:
            return 0
        decision = self.controller.decide(decoding)
        self._draft_lengths.update(decision.num_draft_tokens)
        return decision.draft_depth

    def _requests_that_will_decode(
        self, scheduler_output: SchedulerOutput
    ) -> list[DecodeRequest]:
        decoding = []
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            num_computed = request.num_computed_tokens + num_tokens
            # The same test by which vLLM sets `is_prefill_chunk` a moment later.
            if num_computed >= request.num_tokens + request.num_output_placeholders:
                decoding.append(DecodeRequest(request_id, num_computed))
        return decoding

    def _cut_draft(self, request_id: str) -> None:
        """Shorten a request's waiting draft to the K that was decided for it."""
        request = self.requests.get(request_id)
        draft_length = self._draft_lengths.get(request_id)
        if request is None or draft_length is None:
            return
        # A new list: the async scheduler shares one placeholder list among requests.
        request.spec_token_ids = request.spec_token_ids[:draft_length]

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> Any:
        num_invalid = (num_invalid_spec_tokens or {}).get(request_id, 0)
        self._request_outcomes.append(
            RequestOutcome(
                request_id, num_draft_tokens - num_invalid, num_accepted_tokens
            )
        )
        return super().make_spec_decoding_stats(
            spec_decoding_stats,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
            num_invalid_spec_tokens=num_invalid_spec_tokens,
            request_id=request_id,
        )

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
    ) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if scheduler_output.total_num_scheduled_tokens:
            self.controller.observe(self._take_outcome(scheduler_output))
        return outputs

    def _take_outcome(self, scheduler_output: SchedulerOutput) -> StepOutcome:
        now_s = time.monotonic()
        started_at_s = max(self._step_started_at_s.popleft(), self._last_output_at_s)
        self._last_output_at_s = now_s
        requests, self._request_outcomes = tuple(self._request_outcomes), []
        return StepOutcome(
            requests=requests,
            num_requests=len(scheduler_output.num_scheduled_tokens),
            num_scheduled_tokens=scheduler_output.total_num_scheduled_tokens,
            step_time_s=now_s - started_at_s,
        )


class MTPPlusScheduler(_ControlledScheduler):
    """Sync scheduling: drafts come back to the scheduler between two steps."""

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        super().update_draft_token_ids(draft_token_ids)
        for request_id in draft_token_ids.req_ids:
            self._cut_draft(request_id)


class MTPPlusAsyncScheduler(_ControlledScheduler, AsyncScheduler):
    """Async scheduling: the scheduler only counts drafts, the worker keeps them."""

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        for request_id in scheduler_output.num_scheduled_tokens:
            self._cut_draft(request_id)
