"""Draft lengths of a batch's requests under a plan; it stands between two steps."""

from collections.abc import Mapping, Sequence

from vllm_mtp.control.planner import Group, Plan
from vllm_mtp.control.survival import SurvivalModel
from vllm_mtp.records import DecodeRequest


class DraftLengths:
    """Draft lengths by class, each worked out once for a plan."""

    def __init__(
        self, survival: SurvivalModel, depths: Sequence[int], copies: SurvivalModel
    ) -> None:
        """Begin.

        Args:
            survival: What is believed of acceptance.
            depths: Allowed ones, rising.
            copies: What is believed of continuations from contexts.
        """
        self._survival, self._copies = survival, copies
        self._can_be_off = 0 in depths
        self._longest = depths[-1]
        self._plan: Plan | None = None
        self._of_class: dict[int, int] = {}

    def of(self, requests: Sequence[DecodeRequest], plan: Plan) -> dict[str, int]:
        """Draft length of each request, pins aside."""
        if plan.is_uniform:
            return dict.fromkeys([request[0] for request in requests], plan.depth)
        if self._plan is not plan:
            self._plan, self._of_class = plan, {}
        of_class, survival = self._of_class, self._survival
        chosen = {}
        for request in requests:
            class_id = survival.class_of.get(request.request_id)
            if class_id is None:
                class_id = survival.see(request)
            length = of_class.get(class_id)
            if length is None:
                length = plan.draft_length(survival.survival_of_class(class_id))
                of_class[class_id] = length
            chosen[request.request_id] = length
        return chosen

    def continued(
        self,
        requests: Sequence[DecodeRequest],
        plan: Plan,
        chosen: Mapping[str, int],
    ) -> dict[str, int]:
        """Draft lengths of requests whose contexts continue their drafts.

        Args:
            requests: The batch.
            plan: In use.
            chosen: Draft lengths without that.
        """
        found = {}
        for request in requests:
            length = chosen[request.request_id]
            if not request.is_copying or request.pinned_draft_length is not None:
                continue
            group = Group(
                1,
                self._survival.survival_of_class(self._survival.see(request)),
                copied=self._copies.survival_of_class(self._copies.see(request)),
            )
            longest = plan.copy_length(length, group)
            if longest > length:
                found[request.request_id] = longest
        return found

    def bounded(self, pin: int) -> int:
        """The draft length that a pinned one becomes."""
        return min(max(pin, 0), self._longest)

    def pin(
        self, chosen: dict[str, int], requests: Sequence[DecodeRequest], depth: int
    ) -> int:
        """Put pins in their places; returns the depth that they need as well."""
        is_any_free = False
        for request in requests:
            pin = request.pinned_draft_length
            if pin is None:
                is_any_free = True
            else:
                chosen[request.request_id] = self.bounded(pin)
        deepest = max(chosen.values())
        if is_any_free or not self._can_be_off:
            return max(depth, deepest)
        return deepest
