"""Drafts that are nothing but copies: what is believed of them, and when they pay.

A context that stands behind a long match offers a draft before anything is drafted,
where the worker searches it on the host. So copied drafts are no part of a plan:
whatever the plan is, such an offer is worth more than what would be drafted, or not.
"""

from collections.abc import Sequence

from vllm_mtp.control.planner import Plan
from vllm_mtp.control.step_times import Times
from vllm_mtp.control.survival import SurvivalModel
from vllm_mtp.records import DecodeRequest, StepOutcome


class CopiedDrafts:
    """Chooses their lengths under a plan."""

    def __init__(self, survival: SurvivalModel, may_copy: bool) -> None:
        """Believe of copies what is believed of any draft at first.

        Args:
            survival: Of tokens of the MTP layers.
            may_copy: Otherwise no request has one.
        """
        self._drafted, self._may_copy = survival, may_copy
        self.survival = SurvivalModel(survival.max_draft_length)
        """Of copied tokens."""
        self._plan: Plan | None = None
        self._of_classes: dict[tuple[int, int], int] = {}

    def lengths(
        self, plan: Plan, times: Times, requests: Sequence[DecodeRequest]
    ) -> dict[str, int]:
        """Draft lengths of requests whose contexts offer a draft.

        Args:
            plan: In use.
            times: Expected times of the batch.
            requests: The batch. Those for whom other drafts are worth more, and those
                that do not copy, are left out.
        """
        if self._plan is not plan:
            self._plan, self._of_classes = plan, {}
        if len(self.survival.class_of) > 2 * len(requests) + 256:
            self.survival.keep_only(request.request_id for request in requests)
        found = {}
        for request in requests if self._may_copy else ():
            if not request.is_copying or request.pinned_draft_length is not None:
                continue
            classes = self._drafted.see(request), self.survival.see(request)
            length = self._of_classes.get(classes)
            if length is None:
                length = self._length(plan, times, len(requests), *classes)
                self._of_classes[classes] = length
            if length:
                found[request.request_id] = length
        return found

    def observe(self, steps: Sequence[StepOutcome], max_outcomes: int) -> None:
        """Learn from steps, as `SurvivalModel.observe` does."""
        if self._may_copy:
            copied = [draft for step in steps for draft in step.copied_drafts]
            self.survival.observe(copied, len(steps), max_outcomes)

    def _length(
        self, plan: Plan, times: Times, num_requests: int, drafted: int, copied: int
    ) -> int:
        """Of a request of these classes: that which is worth most; 0 for its draft.

        Worth is in tokens, less those that the same time would bring under the plan.
        Where there are other requests draft steps are made for them.
        """
        chances = self._drafted.survival_of_class(drafted)
        mean = plan.draft_length(chances)
        depth = plan.depth if num_requests > 1 else 0
        before_s, best, longest = plan.seconds, plan.tokens - 1.0, 0
        if num_requests > 1:
            before_s = times.seconds(mean, depth)
            best = sum(chances[:mean])
        accepted = 0.0
        for length, chance in enumerate(self.survival.survival_of_class(copied), 1):
            accepted += chance
            after_s = times.seconds(mean + (length - mean) / num_requests, depth)
            worth = accepted - plan.goodput * (after_s - before_s)
            if worth > best:
                best, longest = worth, length
        return longest
