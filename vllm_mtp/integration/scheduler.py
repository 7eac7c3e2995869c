"""The schedulers: vLLM's own, plus a controller that decides K and sees every outcome.

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
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from vllm_mtp.config import graph_tiers
from vllm_mtp.control.controller import Controller
from vllm_mtp.control.factory import common_depth, make_controller
from vllm_mtp.control.tracing import TracingController
from vllm_mtp.integration import pause
from vllm_mtp.integration.draft_sampling import can_choose_instead, draws_drafts
from vllm_mtp.integration.early_stop import (
    ScoredDraftTokenIds,
    directed,
    may_stop_early,
)
from vllm_mtp.integration.scheduled_steps import (
    CaughtUp,
    ScheduledStep,
    StepOutcomes,
    UnseenCounts,
)
from vllm_mtp.integration.settings import settings_of, trace_header, trace_path
from vllm_mtp.records import (
    DecodeRequest,
    DraftDecision,
    RequestOutcome,
    StepOutcome,
    StopRule,
)
from vllm_mtp.request_options import pinned_draft_length

_GREEDY_TEMPERATURE = 1e-5
"""Below it vLLM samples greedily."""


def _controller_of(
    vllm_config: Any, compares_drafts: bool, stops_early: bool
) -> Controller:
    own, bound = settings_of(vllm_config), vllm_config.num_speculative_tokens
    depths = _allowed_depths(vllm_config)
    controller = make_controller(
        own,
        bound,
        depths,
        compares_drafts=compares_drafts,
        stops_early=stops_early,
    )
    if own.trace_path is None:
        return controller
    path = trace_path(own.trace_path, vllm_config)
    return TracingController(controller, path, trace_header(vllm_config), bound)


def _allowed_depths(vllm_config: Any) -> tuple[int, ...] | None:
    """Depths that ranks agree on, or that have CUDA graphs; None for all."""
    bound = vllm_config.num_speculative_tokens
    if vllm_config.parallel_config.data_parallel_size > 1:
        return common_depth(bound)
    mode = vllm_config.compilation_config.cudagraph_mode
    if vllm_config.use_v2_model_runner and mode.has_full_cudagraphs():
        return graph_tiers(bound)
    return None


class _RequestTraits:
    """What does not change during a request's life."""

    __slots__ = ("is_greedy", "pinned_draft_length")

    def __init__(self, request: Any, max_draft_length: int) -> None:
        params = request.sampling_params
        self.is_greedy = params is None or params.temperature < _GREEDY_TEMPERATURE
        # Validated when the request came in.
        pin = pinned_draft_length(params and params.extra_args, max_draft_length)
        if pin is None and not self.is_greedy and params.seed is not None:
            # How random numbers are used up depends on the draft length, and that on
            # the clock: only without drafts does a seed mean the same text again.
            pin = 0
        self.pinned_draft_length = pin


def _for_others(
    rule: StopRule | None, still_waiting: Collection[str]
) -> StopRule | None:
    """A rule that drafts nothing for some."""
    if rule is None or not still_waiting:
        return rule
    others = {i: c for i, c in rule.chances.items() if i not in still_waiting}
    return replace(rule, chances=others)


class _ControlledScheduler(Scheduler):
    """What the sync and the async scheduler have in common."""

    controller: Controller
    num_lookahead_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.controller = _controller_of(
            self.vllm_config,
            self._can_compare_drafts(),
            may_stop_early(self.vllm_config),
        )
        is_async = isinstance(self, AsyncScheduler)
        self._outcomes = StepOutcomes(is_async and not current_platform.is_cpu())
        self._unseen = UnseenCounts() if pause.may_rest(self.vllm_config) else None
        self._draft_lengths: dict[str, int] = {}
        self._still_waiting: frozenset[str] = frozenset()
        """Requests whose drafts of this step are made without all of their KV."""
        self._stop_rule: StopRule | None = None
        """Of the step that was scheduled last."""
        self._is_comparing = False
        """That step drafts what will be compared, not verified."""
        self._traits: dict[str, _RequestTraits] = {}
        self._pinned: set[str] = set()
        """Requests that fix a draft length above 0."""
        self._max_lookahead = self.num_lookahead_tokens

    def _can_compare_drafts(self) -> bool:
        return False

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        may_draft = self.controller.may_draft() or bool(self._pinned)
        self.num_lookahead_tokens = self._max_lookahead if may_draft else 0
        return super().schedule(*args, **kwargs)

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        if request.request_id in self.requests:
            # Before its first step, so that slots for its drafts are reserved then.
            self._traits_of(request)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        for request_id in scheduler_output.finished_req_ids:
            self._forget(request_id)
        depth = 0
        if scheduler_output.total_num_scheduled_tokens:
            depth = self._close_step(scheduler_output)
        scheduler_output.num_spec_tokens_to_schedule = depth
        super()._update_after_schedule(scheduler_output)

    def _forget(self, request_id: str) -> None:
        self._draft_lengths.pop(request_id, None)
        self._traits.pop(request_id, None)
        self._pinned.discard(request_id)
        if self._unseen is not None:
            self._unseen.forget(request_id)

    def _close_step(self, scheduler_output: SchedulerOutput) -> int:
        """Decide about a step and note what is known of it; returns its depth."""
        next_decoding: list[DecodeRequest] = []
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
                    )
                )
        decision = self._decide(next_decoding)
        depth = decision.draft_depth
        caught_up = self._rest_or_catch_up(scheduler_output, depth)
        self._draft_lengths.update(decision.num_draft_tokens)
        self._draft_lengths.update(dict.fromkeys(caught_up.still_waiting, 0))
        self._still_waiting = caught_up.still_waiting
        self._stop_rule = _for_others(decision.stop_rule, caught_up.still_waiting)
        self._is_comparing = depth > 0 and not any(decision.num_draft_tokens.values())
        self._outcomes.begin(
            ScheduledStep(
                len(scheduler_output.num_scheduled_tokens),
                scheduler_output.total_num_scheduled_tokens,
                num_decoding,
                num_prefill_tokens,
                num_context_tokens,
                depth,
                caught_up.num_tokens,
            )
        )
        return depth

    def _rest_or_catch_up(
        self, scheduler_output: SchedulerOutput, depth: int
    ) -> CaughtUp:
        """What the MTP layers do in this step, as far as the scheduler cares."""
        num_rows_of = scheduler_output.num_scheduled_tokens
        if self._unseen is not None:
            if depth:
                return self._unseen.catch_up(num_rows_of)
            if pause.mtp_layers_rest(
                depth,
                len(num_rows_of),
                scheduler_output.total_num_scheduled_tokens,
                len(scheduler_output.scheduled_spec_decode_tokens),
            ):
                self._unseen.rest(num_rows_of)
        return CaughtUp(0, frozenset())

    def _traits_of(self, request: Any) -> _RequestTraits:
        traits = self._traits.get(request.request_id)
        if traits is None:
            traits = _RequestTraits(request, self.num_spec_tokens)
            self._traits[request.request_id] = traits
            if traits.pinned_draft_length:
                self._pinned.add(request.request_id)
        return traits

    def _decide(self, decoding: list[DecodeRequest]) -> DraftDecision:
        """Ask the controller, where there is something to decide."""
        # Nobody would use the drafts of a step that only prefills. Ranks of a
        # data-parallel engine must draft equally deep, whatever their own batch.
        if not decoding and self.parallel_config.data_parallel_size == 1:
            return DraftDecision(0, {}, "prefill")
        decision = self.controller.decide(decoding)
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
        self._outcomes.add(
            RequestOutcome(
                request_id,
                num_draft_tokens - num_invalid,
                num_accepted_tokens,
                self._confidences_of(request_id),
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
            self._hear(self._outcomes.take())
        return outputs

    def _hear(self, outcome: StepOutcome) -> None:
        self.controller.observe(outcome)

    def _confidences_of(self, request_id: str) -> tuple[float, ...]:
        return ()


class MTPPlusScheduler(_ControlledScheduler):
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
        self._chooses_to_compare = self._draws_drafts and can_choose_instead(
            self.vllm_config
        )

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._hear_with_depth(None)
        output = super().schedule(*args, **kwargs)
        if not output.num_spec_tokens_to_schedule:
            return output
        chooses = self._is_comparing and self._chooses_to_compare
        return directed(output, self._stop_rule, chooses)

    def _hear(self, outcome: StepOutcome) -> None:
        if self._stop_rule is None:
            super()._hear(outcome)
        else:
            self._waiting_outcome = outcome

    def _hear_with_depth(self, depth: int | None) -> None:
        outcome, self._waiting_outcome = self._waiting_outcome, None
        if outcome is not None:
            known = outcome if depth is None else replace(outcome, draft_depth=depth)
            super()._hear(known)

    def _confidences_of(self, request_id: str) -> tuple[float, ...]:
        return self._confidences.get(request_id, ())

    def _can_compare_drafts(self) -> bool:
        config = self.vllm_config
        return not draws_drafts(config) or can_choose_instead(config)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        super().update_draft_token_ids(draft_token_ids)
        self._confidences.clear()
        if isinstance(draft_token_ids, ScoredDraftTokenIds):
            self._take_scores(draft_token_ids)
        for request_id in draft_token_ids.req_ids:
            draft = self._cut_draft(request_id)
            is_verified = self._draft_lengths.get(request_id, 0) > 0
            if draft and not is_verified and self._tells(request_id):
                self._not_verified[request_id] = draft[0]

    def _tells(self, request_id: str) -> bool:
        """Whether it says something that a draft agrees with what the target samples.

        Not if it was made without all of its KV, nor if it was drawn: then it agrees
        less often than it would be accepted. The likeliest token agrees as often as it
        is accepted, and a drawn one is accepted somewhat more often: a careful guess.
        """
        if request_id in self._still_waiting:
            return False
        if self._is_comparing and self._chooses_to_compare:
            return True
        traits = self._traits.get(request_id)  # none before its prompt is through
        return not self._draws_drafts or (traits is not None and traits.is_greedy)

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
        """Whether the target sampled what was drafted and not verified."""
        index = model_runner_output.req_id_to_index
        verified = scheduler_output.scheduled_spec_decode_tokens
        for request_id, draft_token_id in self._not_verified.items():
            if request_id in index and request_id not in verified:
                sampled = model_runner_output.sampled_token_ids[index[request_id]]
                if sampled:
                    is_same = int(sampled[0]) == draft_token_id
                    self._outcomes.add_compared(
                        RequestOutcome(
                            request_id,
                            1,
                            int(is_same),
                            self._confidences_of(request_id)[:1],
                        )
                    )
        self._not_verified.clear()


class MTPPlusAsyncScheduler(_ControlledScheduler, AsyncScheduler):
    """Async scheduling: the scheduler only counts drafts, the worker keeps them."""

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        for request_id in scheduler_output.num_scheduled_tokens:
            self._cut_draft(request_id)
