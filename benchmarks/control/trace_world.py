"""What a replay needs of a world, be it drawn from laws or taken from a recording.

One step, in the order in which a scheduler meets it::

    begin      requests come and go; the controller sees those that will decode in the
               next step
    decide     how deep this step drafts, and what the next one verifies
    step       verify the draft tokens of the decision *before*, draft, commit
"""

from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from vllm_mtp.records import DecodeRequest, DraftDecision, StepOutcome

# [num_requests] or [num_requests, K_max]
Array = NDArray[Any]

# [num_points] seconds or rows
Points = NDArray[Any]


class CostCurve(Protocol):
    """Noise-free times of an engine."""

    def verify_s(
        self, num_requests: int, rows: Points, context: float, is_uniform: bool
    ) -> Points:
        """Seconds of a target pass.

        Args:
            num_requests: Requests that decode.
            rows: Rows of the pass, of several possible passes.
            context: Tokens in the KV cache, summed over the requests.
            is_uniform: Every request has equally many rows.
        """
        ...

    def draft_s(self, num_requests: int, depth: int, context: float) -> float:
        """Seconds of ``depth`` draft steps."""
        ...

    def catch_up_s(self, num_tokens: int) -> float:
        """Seconds of the MTP layers' pass over tokens that they have missed."""
        ...


class Truth(NamedTuple):
    """What an oracle knows about the requests that decode in a step."""

    request_ids: list[str]
    # [num_requests, K_max]
    survival: Array
    context: float
    """Tokens in the KV cache, summed."""

    @property
    def num_requests(self) -> int:
        return len(self.request_ids)


class Engine(Protocol):
    """A world that runs."""

    def begin(self) -> list[DecodeRequest]:
        """Admit requests; returns those that will decode in the next step."""
        ...

    def truth(self) -> Truth:
        """The requests that decode in this step: those that began before it."""
        ...

    def resume_s(self, depth: int) -> float:
        """Seconds of the catch-up pass, if this step drafts after a pause."""
        ...

    def step(self, decision: DraftDecision) -> tuple[StepOutcome, list[StepOutcome]]:
        """Run a step whose drafts ``decision`` ordered.

        Returns:
            The step's outcome, and the outcomes that the controller hears of now.
        """
        ...


class ReplayWorld(Protocol):
    """A load on a machine, by its true acceptance and cost."""

    @property
    def name(self) -> str: ...

    @property
    def cost(self) -> CostCurve: ...

    @property
    def max_draft_length(self) -> int: ...

    @property
    def sees_shadow_drafts(self) -> bool:
        """Outcomes tell how drafts would have done of which nothing was verified."""
        ...

    @property
    def is_stationary(self) -> bool:
        """Nothing but the requests themselves changes with time."""
        ...

    @property
    def change_steps(self) -> tuple[int, ...]:
        """Steps at which acceptance or load changes abruptly."""
        ...

    def start(self, seed: int) -> Engine:
        """An engine at its first step."""
        ...
