"""Who does what in a step that was just scheduled."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput

from vllm_mtp.integration.scheduler.pending_counts import PendingCounts
from vllm_mtp.integration.scheduler.request_traits import TraitsOfRequests
from vllm_mtp.records import DecodeRequest, StepOutcome


class Batch(NamedTuple):
    """The requests of a step."""

    num_requests: int
    num_rows: int
    next_decoding: list[DecodeRequest]
    """Those that decode in the next step, too."""
    without_draft: list[str]
    """Those that decode in this step and have no draft tokens verified."""
    num_decoding: int
    num_prefill_tokens: int
    num_context_tokens: int
    """Of those that decode in this step."""

    @property
    def only_decodes_without_drafts(self) -> bool:
        return len(self.without_draft) == len(self.next_decoding) == self.num_requests

    def as_scheduled(self, draft_depth: int, num_backfill_tokens: int) -> StepOutcome:
        """What is known of the step before it runs."""
        return StepOutcome(
            requests=(),
            num_requests=self.num_requests,
            num_scheduled_tokens=self.num_rows,
            step_time_s=0.0,
            draft_depth=draft_depth,
            num_decode_requests=self.num_decoding,
            num_prefill_tokens=self.num_prefill_tokens,
            num_context_tokens=self.num_context_tokens,
            num_backfill_tokens=num_backfill_tokens,
            is_greedy=all(request.is_greedy for request in self.next_decoding),
        )


def batch_of(
    scheduler_output: SchedulerOutput,
    requests: Mapping[str, Any],
    traits: TraitsOfRequests,
    pending: PendingCounts | None,
    copying: Collection[str] = (),
) -> Batch:
    """Sort out a step.

    Args:
        scheduler_output: vLLM's, before its requests count the step's tokens.
        requests: vLLM's, by id.
        traits: Of them.
        pending: Tokens that the MTP layers have not read; None if they always run.
        copying: Requests whose contexts have offered continuations lately.
    """
    next_decoding: list[DecodeRequest] = []
    without_draft: list[str] = []
    num_decoding = num_prefill_tokens = num_context_tokens = 0
    drafts = scheduler_output.scheduled_spec_decode_tokens
    known_traits = traits.known
    if pending is not None and not pending.has_any:
        pending = None
    for request_id, num_rows in scheduler_output.num_scheduled_tokens.items():
        request = requests[request_id]
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
            known = known_traits.get(request_id) or traits.of(request)
            next_decoding.append(
                DecodeRequest(
                    request_id,
                    num_after,
                    known.is_greedy,
                    known.pinned_draft_length,
                    0 if pending is None else pending.of(request_id),
                    known.is_constrained,
                    request_id in copying and known.pinned_draft_length is None,
                )
            )
    return Batch(
        len(scheduler_output.num_scheduled_tokens),
        scheduler_output.total_num_scheduled_tokens,
        next_decoding,
        without_draft,
        num_decoding,
        num_prefill_tokens,
        num_context_tokens,
    )
