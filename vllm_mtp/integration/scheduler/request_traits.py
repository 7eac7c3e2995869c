"""What requests are like, as far as drafting cares."""

from typing import Any

from vllm_mtp.request_options import pinned_draft_length

_GREEDY_TEMPERATURE = 1e-5
"""Below it vLLM samples greedily."""


class RequestTraits:
    """What does not change during a request's life."""

    __slots__ = ("is_constrained", "is_greedy", "pinned_draft_length")

    def __init__(self, request: Any, max_draft_length: int) -> None:
        params = request.sampling_params
        self.is_greedy = params is None or params.temperature < _GREEDY_TEMPERATURE
        self.is_constrained = request.use_structured_output or (
            params is not None and params.allowed_token_ids is not None
        )
        # Validated when the request came in.
        pin = pinned_draft_length(params and params.extra_args, max_draft_length)
        if pin is None and not self.is_greedy and params.seed is not None:
            # How random numbers are used up depends on the draft length, and that on
            # the clock: only without drafts does a seed mean the same text again.
            pin = 0
        self.pinned_draft_length = pin


class TraitsOfRequests:
    """Worked out once for each request."""

    def __init__(self, max_draft_length: int) -> None:
        """No requests yet.

        Args:
            max_draft_length: ``K_max``.
        """
        self._max_draft_length = max_draft_length
        self.known: dict[str, RequestTraits] = {}
        self.pinned: set[str] = set()
        """Requests that fix a draft length above 0."""
        self.switched_off: set[str] = set()
        """Requests that fix K = 0."""

    def of(self, request: Any) -> RequestTraits:
        """Those of a request of vLLM's scheduler."""
        request_id = request.request_id
        traits = self.known.get(request_id)
        if traits is None:
            traits = RequestTraits(request, self._max_draft_length)
            self.known[request_id] = traits
            if traits.pinned_draft_length:
                self.pinned.add(request_id)
            elif traits.pinned_draft_length == 0:
                self.switched_off.add(request_id)
        return traits

    def is_sampled(self, request_id: str) -> bool:
        """Whether a request is known not to be greedy."""
        traits = self.known.get(request_id)
        return traits is None or not traits.is_greedy

    def forget(self, request_id: str) -> RequestTraits | None:
        """A request is gone, or has other parameters now."""
        self.pinned.discard(request_id)
        self.switched_off.discard(request_id)
        return self.known.pop(request_id, None)
