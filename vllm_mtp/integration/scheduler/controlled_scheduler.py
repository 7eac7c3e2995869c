"""vLLM's scheduler, plus a controller that decides K and sees every outcome.

Life of a decision: ``_update_after_schedule`` closes a step, so there the controller
chooses how deep the worker drafts at the end of this step (``draft_depth``) and how
many of those tokens each request will have verified in the next one. The draft tokens
beyond a request's own K are cut before vLLM schedules them: in the sync scheduler when
they arrive, in the async one from the placeholders that stand for them.

Slots for drafts are reserved (``num_lookahead_tokens``) when a step is scheduled, so
only for steps that may draft: the controller says so beforehand.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput

from vllm_mtp.control.controller import Controller
from vllm_mtp.integration.load.compat import check_attributes
from vllm_mtp.integration.observe.step_metrics import STATS_KEY, StepMetrics
from vllm_mtp.integration.scheduler.controllers import controller_of
from vllm_mtp.integration.scheduler.drafting_failure import DraftingSwitch
from vllm_mtp.integration.scheduler.request_traits import RequestTraits
from vllm_mtp.integration.scheduler.scheduled_steps import (
    CaughtUp,
    ScheduledStep,
    StepOutcomes,
    UnseenCounts,
)
from vllm_mtp.integration.scheduler.undecided_steps import RestingSteps
from vllm_mtp.integration.scheduler.vocabulary_news import (
    check_first,
    failure_of,
    news_of,
)
from vllm_mtp.integration.worker import drafting_disabled
from vllm_mtp.metrics.stats import FAILED
from vllm_mtp.records import (
    DecodeRequest,
    DraftDecision,
    RequestOutcome,
    StepOutcome,
    StopRule,
)


def _for_others(
    rule: StopRule | None, still_waiting: Collection[str]
) -> StopRule | None:
    """A rule that drafts nothing for some."""
    if rule is None or not still_waiting:
        return rule
    others = {i: c for i, c in rule.chances.items() if i not in still_waiting}
    return replace(rule, chances=others)


class _Batch(NamedTuple):
    """Who does what in a step."""

    next_decoding: list[DecodeRequest]
    """Those that decode in the next step, too."""
    without_draft: list[str]
    """Those that decode in this step and have no draft tokens verified."""
    num_decoding: int
    num_prefill_tokens: int
    num_context_tokens: int
    """Of those that decode in this step."""


class ControlledScheduler(Scheduler):
    """What the sync and the async scheduler have in common."""

    controller: Controller
    num_lookahead_tokens: int
    dynamic_sd_lookup: list[int] | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        is_async = isinstance(self, AsyncScheduler)
        # Where scheduling is async drafts do not come back to be compared.
        self.controller = controller_of(self.vllm_config, not is_async)
        self._outcomes = StepOutcomes(is_async and not current_platform.is_cpu())
        self._resting = RestingSteps()
        self._ends_resting_step = False
        """The output that is being taken up is of such a step."""
        self._unseen = (
            UnseenCounts() if drafting_disabled.may_rest(self.vllm_config) else None
        )
        self._draft_lengths: dict[str, int] = {}
        self._still_waiting: frozenset[str] = frozenset()
        """Requests whose drafts of this step are made without all of their KV."""
        self._stop_rule: StopRule | None = None
        """Of the step that was scheduled last."""
        self._switch = DraftingSwitch(self.vllm_config, self._drafting_failed)
        self._traits: dict[str, RequestTraits] = {}
        self._pinned: set[str] = set()
        """Requests that fix a draft length above 0."""
        self._switched_off: set[str] = set()
        """Requests that fix K = 0."""
        self._max_lookahead = self.num_lookahead_tokens
        check_attributes(self, ("dynamic_sd_lookup",))
        if self.dynamic_sd_lookup is None:
            # Else vLLM fills a prompt's last token up with draft tokens that nobody
            # made, of requests that want none, too; a seed then gives another text.
            sizes = self.scheduler_config.max_num_seqs + 1
            self.dynamic_sd_lookup = [self.num_spec_tokens] * sizes
        self._has_heard_worker = False
        self.metrics = (
            StepMetrics(self.controller, self.num_spec_tokens)
            if self.log_stats
            else None
        )

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._outcomes.scheduling()
        if self._pinned or not self._resting.num_left:
            may_draft = self._may_draft()
            self.num_lookahead_tokens = self._max_lookahead if may_draft else 0
            steps = 0 if may_draft else self._ask(self.controller.rest_steps, 0)
            self._resting.begin(steps)
        return super().schedule(*args, **kwargs)

    def _ask(self, method: Any, otherwise: Any, *args: Any) -> Any:
        return self._switch.ask(method, *args, otherwise=otherwise)

    def _may_draft(self) -> bool:
        if self._ask(self.controller.may_draft, False):
            return True
        return bool(self._pinned) and not self._switch.is_off

    def _drafting_failed(self, part: str) -> None:
        if self.metrics is not None:
            self.metrics.drafting_failed(part)

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        if request.request_id in self.requests:
            # Before its first step, so that slots for its drafts are reserved then.
            self._traits_of(request)

    def _update_request_as_session(self, session: Any, update: Any) -> None:
        """The next input of a streaming session: as good as another request.

        vLLM keeps the tokens of the last turn whose KV is there, which without
        speculation are all but the last one. A turn may have ended in the midst of
        accepted draft tokens: then there is KV of the last one and of some behind it.
        """
        if session.num_output_tokens:
            last = session.num_tokens - 1
            session.num_computed_tokens = min(session.num_computed_tokens, last)
        super()._update_request_as_session(session, update)
        self._forget_options(session.request_id)
        self._traits_of(session)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        if scheduler_output.finished_req_ids:
            self._tell_rested()
            for request_id in scheduler_output.finished_req_ids:
                self._forget(request_id)
        if self._unseen is not None:
            # Computed anew, also by the MTP layers.
            for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
                self._unseen.forget(request_id)
        depth = 0
        if scheduler_output.total_num_scheduled_tokens:
            if self._resting.goes_on(scheduler_output):
                self._outcomes.begin_resting()
            else:
                self._tell_rested()
                depth = self._close_step(scheduler_output)
        scheduler_output.num_spec_tokens_to_schedule = depth
        super()._update_after_schedule(scheduler_output)

    def _forget_options(self, request_id: str) -> None:
        """What was worked out from a request's parameters, and decided with it."""
        self._draft_lengths.pop(request_id, None)
        traits = self._traits.pop(request_id, None)
        if self.metrics is not None and traits is not None:
            self.metrics.ended(request_id, traits.is_greedy)
        self._pinned.discard(request_id)
        self._switched_off.discard(request_id)

    def _forget(self, request_id: str) -> None:
        self._forget_options(request_id)
        if self._unseen is not None:
            self._unseen.forget(request_id)

    def _batch_of(self, scheduler_output: SchedulerOutput) -> _Batch:
        """Sort out who does what in a step that was just scheduled."""
        next_decoding: list[DecodeRequest] = []
        without_draft: list[str] = []
        num_decoding = num_prefill_tokens = num_context_tokens = 0
        drafts, unseen = scheduler_output.scheduled_spec_decode_tokens, self._unseen
        for request_id, num_rows in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            num_before = request.num_computed_tokens
            num_after = num_before + num_rows
            num_drafts = len(drafts[request_id]) if request_id in drafts else 0
            if num_rows == num_drafts + 1 and num_before >= request.num_prompt_tokens:
                num_decoding += 1
                num_context_tokens += num_before
                if not num_drafts:
                    without_draft.append(request_id)
            else:
                num_prefill_tokens += num_rows
            # The same test by which vLLM sets `is_prefill_chunk` a moment later.
            if num_after >= request.num_tokens + request.num_output_placeholders:
                traits = self._traits_of(request)
                next_decoding.append(
                    DecodeRequest(
                        request_id,
                        num_after,
                        traits.is_greedy,
                        traits.pinned_draft_length,
                        unseen.of(request_id) if unseen else 0,
                        traits.is_constrained,
                    )
                )
        return _Batch(
            next_decoding,
            without_draft,
            num_decoding,
            num_prefill_tokens,
            num_context_tokens,
        )

    def _close_step(self, scheduler_output: SchedulerOutput) -> int:
        """Decide about a step and note what is known of it; returns its depth."""
        batch = self._batch_of(scheduler_output)
        next_decoding, without_draft = batch.next_decoding, batch.without_draft
        if self.metrics is not None and without_draft:
            self.metrics.decoding_without_draft(without_draft, self._switched_off)
        decision = self._decide(next_decoding)
        depth = decision.draft_depth
        caught_up = self._rest_or_catch_up(scheduler_output, depth)
        if self.metrics is not None:
            self.metrics.decided(decision, caught_up.still_waiting)
        self._draft_lengths.update(decision.num_draft_tokens)
        self._draft_lengths.update(dict.fromkeys(caught_up.still_waiting, 0))
        self._still_waiting = caught_up.still_waiting
        self._stop_rule = _for_others(decision.stop_rule, caught_up.still_waiting)
        step = ScheduledStep(
            len(scheduler_output.num_scheduled_tokens),
            scheduler_output.total_num_scheduled_tokens,
            batch.num_decoding,
            batch.num_prefill_tokens,
            batch.num_context_tokens,
            depth,
            caught_up.num_tokens,
            all(request.is_greedy for request in next_decoding),
        )
        self._outcomes.begin(step)
        is_quiet = len(without_draft) == len(next_decoding) == step.num_requests
        if not depth and is_quiet:
            # All of them, in the order in which they will be listed again.
            self._resting.may_begin(without_draft, step)
        else:
            self._resting.end()
        return depth

    def _rest_or_catch_up(
        self, scheduler_output: SchedulerOutput, depth: int
    ) -> CaughtUp:
        """What the MTP layers do in this step, as far as the scheduler cares."""
        num_rows_of = scheduler_output.num_scheduled_tokens
        if self._unseen is not None:
            if depth:
                return self._unseen.catch_up(num_rows_of)
            if drafting_disabled.mtp_layers_rest(
                depth,
                len(num_rows_of),
                scheduler_output.total_num_scheduled_tokens,
                len(scheduler_output.scheduled_spec_decode_tokens),
            ):
                self._unseen.rest(num_rows_of)
        return CaughtUp(0, frozenset())

    def _traits_of(self, request: Any) -> RequestTraits:
        traits = self._traits.get(request.request_id)
        if traits is None:
            traits = RequestTraits(request, self.num_spec_tokens)
            self._traits[request.request_id] = traits
            if traits.pinned_draft_length:
                self._pinned.add(request.request_id)
            elif traits.pinned_draft_length == 0:
                self._switched_off.add(request.request_id)
        return traits

    def _decide(self, decoding: list[DecodeRequest]) -> DraftDecision:
        """Ask the controller, where there is something to decide."""
        # Nobody would use the drafts of a step that only prefills. Ranks of a
        # data-parallel engine must draft equally deep, whatever their own batch.
        if not decoding and self.parallel_config.data_parallel_size == 1:
            return DraftDecision(0, {}, "prefill")
        decision = self._ask(self.controller.decide, None, decoding)
        if decision is None:
            return DraftDecision(0, {r.request_id: 0 for r in decoding}, FAILED)
        if not self.num_lookahead_tokens:
            # No slots were reserved, whatever the controller says now.
            lengths = dict.fromkeys(decision.num_draft_tokens, 0)
            return DraftDecision(0, lengths, decision.reason)
        return decision

    def _cut_draft(self, request_id: str) -> list[int]:
        """Shorten a request's waiting draft to the K that was decided for it.

        Returns:
            The draft as it was before.
        """
        request = self.requests.get(request_id)
        if request is None:
            return []
        draft: list[int] = request.spec_token_ids
        draft_length = self._draft_lengths.get(request_id)
        if draft_length is not None:
            # A new list: async scheduling shares one placeholder list among requests.
            request.spec_token_ids = draft[:draft_length]
        return draft

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> Any:
        num_invalid = (num_invalid_spec_tokens or {}).get(request_id, 0)
        outcome = RequestOutcome(
            request_id,
            num_draft_tokens - num_invalid,
            num_accepted_tokens,
            self._confidences_of(request_id),
        )
        self._outcomes.add(outcome)
        if self.metrics is not None and num_draft_tokens:
            self.metrics.verified(outcome, num_draft_tokens)
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
        if not self._has_heard_worker and model_runner_output.req_ids:
            self._has_heard_worker = True
            check_first(model_runner_output)
        if (failed := failure_of(model_runner_output)) is not None:
            self._switch.failed(failed)
        news = news_of(model_runner_output)
        if self.metrics is not None and news is not None:
            self.metrics.vocabulary(*news)
        is_step = scheduler_output.total_num_scheduled_tokens > 0
        is_resting = is_step and self._outcomes.next_is_resting
        self._ends_resting_step = is_resting
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if is_resting:
            self._end_resting_step()
        elif is_step:
            self._hear(self._outcomes.take())
        return outputs

    def _end_resting_step(self) -> None:
        if not self._ends_resting_step:  # told already: nothing is left to run
            return
        self._ends_resting_step = False
        resting = self._resting
        resting.ended(self._outcomes.take_resting())
        if resting.num_scheduled and not resting.num_left and not resting.are_under_way:
            with self._outcomes.learning():
                self._tell_rested()

    def _tell_rested(self) -> None:
        """What was put off while nothing was decided."""
        resting = self._resting
        if not resting.num_scheduled:
            return
        if self._unseen is not None:
            self._unseen.rest(resting.request_ids, resting.num_scheduled)
        outcomes = resting.outcomes()
        if outcomes:
            self._ask(self.controller.rested, None, outcomes)
        if self.metrics is not None:
            self.metrics.decoding_without_draft(
                resting.request_ids, self._switched_off, resting.num_scheduled
            )
            for outcome in outcomes:
                self.metrics.heard(outcome)
        resting.told()

    def _hear(self, outcome: StepOutcome) -> None:
        with self._outcomes.learning():
            self._ask(self.controller.observe, None, outcome)
        if self.metrics is not None:
            self.metrics.heard(outcome)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats = super().make_stats(*args, **kwargs)
        if stats is None or self.metrics is None:
            return stats
        is_idle = not self.get_num_unfinished_requests()
        if is_idle:
            self._end_resting_step()
            self._tell_rested()
        counts = self.metrics.take(is_idle)
        if counts is not None:
            of_plugins = stats.kv_connector_stats or {}
            stats.kv_connector_stats = {**of_plugins, STATS_KEY: counts}
        return stats

    def _confidences_of(self, request_id: str) -> tuple[float, ...]:
        return ()
