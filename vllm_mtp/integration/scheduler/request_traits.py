"""What a request is like, as far as drafting cares."""

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
