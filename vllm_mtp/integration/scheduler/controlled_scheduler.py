"""vLLM's scheduler, plus a controller that decides K and sees every outcome.

Life of a decision: ``_update_after_schedule`` ends the scheduling of a step, so there
the controller chooses how deep the worker drafts at the end of this step
(``draft_depth``) and how many of those tokens each request will have verified in the
next one. The draft tokens beyond a request's own K are cut before vLLM schedules them:
in the sync scheduler when they arrive, in the async one from the placeholders that
stand for them.

What came of steps is delivered to controller and metrics in one place, when the next
step is scheduled: by then output and drafts are in.

Slots for drafts are reserved (``num_lookahead_tokens``) when a step is scheduled, so
only for steps that may draft: the controller says so beforehand.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput

from vllm_mtp.control.controller import Controller
from vllm_mtp.integration.load.compat import check_attributes
from vllm_mtp.integration.observe.step_metrics import STATS_KEY, StepMetrics
from vllm_mtp.integration.scheduler.batch import Batch, batch_of
from vllm_mtp.integration.scheduler.controllers import (
    controller_of,
    doubt_acceptance,
)
from vllm_mtp.integration.scheduler.copying import copying_of_scheduler
from vllm_mtp.integration.scheduler.drafting_failure import DraftingSwitch
from vllm_mtp.integration.scheduler.messages import (
    CopyDirections,
    ReportingOutput,
    report_of,
    warn_lost,
)
from vllm_mtp.integration.scheduler.pending_counts import (
    Backfill,
    PendingCounts,
)
from vllm_mtp.integration.scheduler.request_traits import TraitsOfRequests
from vllm_mtp.integration.scheduler.step_records import (
    StepRecord,
    StepRecords,
)
from vllm_mtp.integration.scheduler.undecided_steps import UndecidedSteps
from vllm_mtp.integration.warm_start.controllers import keep
from vllm_mtp.integration.worker import drafting_disabled
from vllm_mtp.metrics.stats import FAILED
from vllm_mtp.records import DecodeRequest, DraftDecision, RequestOutcome, StopRule


def _for_others(
    rule: StopRule | None, still_waiting: Collection[str]
) -> StopRule | None:
    """A rule that drafts nothing for some."""
    if rule is None or not still_waiting:
        return rule
    others = {i: c for i, c in rule.chances.items() if i not in still_waiting}
    return replace(rule, chances=others)


def _without(outcome: RequestOutcome, num_forbidden: int) -> RequestOutcome:
    """What is left of a draft whose last tokens a grammar forbade."""
    return outcome._replace(
        num_draft_tokens=outcome.num_draft_tokens - num_forbidden,
        num_forbidden=num_forbidden,
    )


class ControlledScheduler(Scheduler):
    """What the sync and the async scheduler have in common."""

    controller: Controller
    num_lookahead_tokens: int
    dynamic_sd_lookup: list[int] | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        is_async = isinstance(self, AsyncScheduler)
        # Where scheduling is async drafts do not come back to the scheduler.
        self.controller = controller_of(self.vllm_config, not is_async)
        self._kept = keep(self.controller, self.vllm_config)
        self._records = StepRecords(is_async and not current_platform.is_cpu())
        self._undecided = UndecidedSteps()
        backfills = drafting_disabled.leaves_pending_tokens(self.vllm_config)
        self._pending = PendingCounts() if backfills else None
        self._copying = copying_of_scheduler(self.vllm_config)
        self._draft_lengths: dict[str, int] = {}
        self._still_waiting: frozenset[str] = frozenset()
        """Requests whose drafts of this step are made without all of their KV."""
        self._stop_rule: StopRule | None = None
        """Of the step that was scheduled last."""
        self._switch = DraftingSwitch(self.vllm_config, self._drafting_failed)
        self._traits = TraitsOfRequests(self.num_spec_tokens)
        self._max_lookahead = self.num_lookahead_tokens
        check_attributes(
            self,
            ("dynamic_sd_lookup", "has_mamba_layers", "reset_preempted_req_ids"),
        )
        if self.dynamic_sd_lookup is None:
            # Else vLLM fills a prompt's last token up with draft tokens that nobody
            # made, of requests that want none, too; a seed then gives another text.
            sizes = self.scheduler_config.max_num_seqs + 1
            self.dynamic_sd_lookup = [self.num_spec_tokens] * sizes
        self._has_first_output = False
        self.metrics = (
            StepMetrics(self.controller, self.num_spec_tokens)
            if self.log_stats
            else None
        )

    # -- a step is scheduled ------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._records.scheduling()
        if self._traits.pinned or not self._undecided.num_left:
            self._deliver()
            may_draft = self._may_draft()
            self.num_lookahead_tokens = self._max_lookahead if may_draft else 0
            steps = (
                0 if may_draft else self._ask(self.controller.num_undecided_steps, 0)
            )
            self._undecided.begin(steps)
        return super().schedule(*args, **kwargs)

    def _ask(self, method: Any, otherwise: Any, *args: Any) -> Any:
        return self._switch.ask(method, *args, otherwise=otherwise)

    def _may_draft(self) -> bool:
        if self._ask(self.controller.may_draft, False):
            return True
        return bool(self._traits.pinned) and not self._switch.is_off

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        if scheduler_output.finished_req_ids:
            self._count_undecided()
            for request_id in scheduler_output.finished_req_ids:
                self._forget(request_id)
        if self._pending is not None:
            # Computed anew, also by the MTP layers.
            for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
                self._pending.forget(request_id)
        depth = 0
        if scheduler_output.total_num_scheduled_tokens:
            if self._undecided.goes_on(scheduler_output):
                self._records.open_repeated()
                if self._copying is not None:
                    self._copying.repeat()
            else:
                self._count_undecided()
                depth = self._decide_step(scheduler_output)
        # vLLM's word for the longest draft; of how deep the MTP layers draft the worker
        # is told apart where that may be less.
        scheduler_output.num_spec_tokens_to_schedule = depth
        super()._update_after_schedule(scheduler_output)

    def _decide_step(self, scheduler_output: SchedulerOutput) -> int:
        """Decide about a step and open its record; returns its longest draft."""
        copying = self._copying
        batch = batch_of(
            scheduler_output,
            self.requests,
            self._traits,
            self._pending,
            () if copying is None else copying.request_ids,
        )
        if self.metrics is not None and batch.without_draft:
            self.metrics.decoding_without_draft(
                batch.without_draft, self._traits.switched_off
            )
        decision = self._decide(batch.next_decoding)
        depth = decision.draft_depth
        backfill = self._backfill(scheduler_output, batch, depth)
        if self.metrics is not None:
            self.metrics.decided(decision, backfill.still_waiting)
        self._draft_lengths.update(decision.num_draft_tokens)
        self._draft_lengths.update(dict.fromkeys(backfill.still_waiting, 0))
        self._still_waiting = backfill.still_waiting
        self._stop_rule = _for_others(decision.stop_rule, backfill.still_waiting)
        self._records.open(batch.as_scheduled(depth, backfill.num_tokens))
        longest, is_copying = depth, False
        if copying is not None:
            longest = copying.decide(decision, self._draft_lengths)
            if copying.directions is not None:
                is_copying = True
                self._draft_lengths.update(copying.directions.longest)
        if not depth and not is_copying and batch.only_decodes_without_drafts:
            # All of them, in the order in which they will be listed again.
            self._undecided.may_begin(batch.without_draft)
        else:
            self._undecided.end()
        return longest

    @property
    def _copy_directions(self) -> CopyDirections | None:
        return None if self._copying is None else self._copying.directions

    def _backfill(
        self, scheduler_output: SchedulerOutput, batch: Batch, depth: int
    ) -> Backfill:
        """What the MTP layers do in this step, as far as the scheduler cares."""
        if self._pending is not None:
            if depth:
                return self._pending.backfill(scheduler_output.num_scheduled_tokens)
            if drafting_disabled.skips_mtp_layers(
                depth,
                batch.num_requests,
                batch.num_rows,
                len(scheduler_output.scheduled_spec_decode_tokens),
            ):
                self._pending.add(scheduler_output.num_scheduled_tokens)
        return Backfill(0, frozenset())

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
        if draft_length is not None and draft_length < len(draft):
            # A new list: async scheduling shares one placeholder list among requests.
            request.spec_token_ids = draft[:draft_length]
        return draft

    # -- its output is here -------------------------------------------------------

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
    ) -> Any:
        self._take_report(model_runner_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return super().update_from_output(scheduler_output, model_runner_output)
        record, report = self._records.close(), report_of(model_runner_output)
        record.set_verified(
            self._outcomes(scheduler_output, model_runner_output),
            report.choices,
            scheduler_output.scheduled_spec_decode_tokens,
        )
        if self._copying is not None:
            record.set_copied(report.copies, self._copying.take(report.copies))
            if self._copying.request_ids:
                self._undecided.end()
        self._add_shadow_drafts(scheduler_output, model_runner_output, record)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._records.updated(record)
        self._deliver_if_idle()
        return outputs

    def _take_report(self, output: ModelRunnerOutput) -> None:
        if not self._has_first_output and output.req_ids:
            self._has_first_output = True
            if not isinstance(output, ReportingOutput):
                warn_lost(ReportingOutput)
        report = report_of(output)
        if report.mixes_draft_lengths:
            self._ask(self.controller.allow_any_mix, None)
        if report.new_weights:
            self._ask(doubt_acceptance, None, self.controller)
            if self.metrics is not None:
                self.metrics.new_weights(report.new_weights)
        if report.failed_part is not None:
            self._switch.failed(report.failed_part)
        if self.metrics is not None:
            if report.levels:
                self.metrics.levels(report.levels)
            if report.vocabulary is not None:
                self.metrics.vocabulary(*report.vocabulary)

    def _add_shadow_drafts(
        self,
        scheduler_output: SchedulerOutput,
        output: ModelRunnerOutput,
        record: StepRecord,
    ) -> None:
        """None, where drafts do not come back to the scheduler."""

    def _outcomes(
        self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput
    ) -> list[RequestOutcome]:
        """What became of the draft tokens that were verified, as vLLM counts them."""
        drafts = scheduler_output.scheduled_spec_decode_tokens
        if not drafts or not output.sampled_token_ids:
            return []
        requests, places = self.requests, output.req_id_to_index
        sampled = output.sampled_token_ids
        counts = [
            (request_id, len(tokens), len(sampled[places[request_id]]) - 1)
            for request_id, tokens in drafts.items()
            if request_id in requests and sampled[places[request_id]]
        ]
        outcomes = self._scored(counts)
        forbidden = scheduler_output.num_invalid_spec_tokens
        if forbidden:
            outcomes = [
                _without(outcome, forbidden.get(outcome.request_id, 0))
                for outcome in outcomes
            ]
        return outcomes

    def _scored(self, counts: list[tuple[str, int, int]]) -> list[RequestOutcome]:
        """Request, draft tokens, accepted ones: with confidences, where they are known.

        Where drafts do not come back to the scheduler, they are not.
        """
        return [RequestOutcome(*each) for each in counts]

    # -- it is delivered ----------------------------------------------------------

    def _deliver(self) -> None:
        """Hand closed records to controller and metrics."""
        self._count_undecided()
        for is_decided, outcomes in self._records.take():
            if is_decided:
                for outcome in outcomes:
                    self._ask(self.controller.observe, None, outcome)
            else:
                self._ask(self.controller.observe_undecided, None, outcomes)
            if self.metrics is not None:
                for outcome in outcomes:
                    self.metrics.finished(outcome)
        if self._kept is not None:
            self._kept.save_if_due()

    def _deliver_if_idle(self) -> bool:
        """Whether no request is left, so that nothing may be scheduled for long."""
        is_idle = not self.get_num_unfinished_requests()
        if is_idle:
            self._deliver()
        return is_idle

    def _count_undecided(self) -> None:
        """Make up for what `_decide_step` notes of each step."""
        num_steps, request_ids = self._undecided.take(), self._undecided.request_ids
        if not num_steps:
            return
        if self._pending is not None:
            self._pending.add(request_ids, num_steps)
        if self.metrics is not None:
            self.metrics.decoding_without_draft(
                request_ids, self._traits.switched_off, num_steps
            )

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats = super().make_stats(*args, **kwargs)
        if stats is None or self.metrics is None:
            return stats
        counts = self.metrics.take(is_idle=self._deliver_if_idle())
        if counts is not None:
            of_plugins = stats.kv_connector_stats or {}
            stats.kv_connector_stats = {**of_plugins, STATS_KEY: counts}
        return stats

    # -- requests come and go -----------------------------------------------------

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        if request.request_id in self.requests:
            # Before its first step, so that slots for its drafts are reserved then.
            self._traits.of(request)

    def _update_request_as_session(self, session: Any, update: Any) -> None:
        """The next input of a streaming session: as good as another request.

        vLLM keeps the tokens of the last turn whose KV is there, which without
        speculation are all but the last one. A turn may have ended in the midst of
        accepted draft tokens: then there is KV of the last one and of some behind it.

        A recurrent state cannot go back there, and vLLM takes that of the last step's
        first row: hybrid models read everything anew
        (``docs/upstream/hybrid-sessions.md``).
        """
        if session.num_output_tokens:
            last = session.num_tokens - 1
            session.num_computed_tokens = min(session.num_computed_tokens, last)
        super()._update_request_as_session(session, update)
        if self.has_mamba_layers:
            self._free_request_blocks(session)
            session.num_computed_tokens = 0
            # The workers forget where its state was.
            self.reset_preempted_req_ids.add(session.request_id)
        self._forget_options(session.request_id)
        self._traits.of(session)

    def _forget_options(self, request_id: str) -> None:
        """What was worked out from a request's parameters, and decided with it."""
        self._draft_lengths.pop(request_id, None)
        if self._copying is not None:
            self._copying.request_ids.pop(request_id, None)
        traits = self._traits.forget(request_id)
        if self.metrics is not None and traits is not None:
            self.metrics.ended(request_id, traits.is_greedy)

    def _forget(self, request_id: str) -> None:
        self._forget_options(request_id)
        if self._pending is not None:
            self._pending.forget(request_id)

    def shutdown(self) -> None:
        if self._kept is not None:
            self._kept.close()
        super().shutdown()

    def _drafting_failed(self, part: str) -> None:
        if self.metrics is not None:
            self.metrics.drafting_failed(part)
