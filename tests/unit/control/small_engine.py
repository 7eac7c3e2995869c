"""A decode loop of a few lines, whose acceptance and times a test sets as it likes."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from vllm_mtp.control.controller import Controller
from vllm_mtp.records import (
    DecodeRequest,
    DraftDecision,
    RequestOutcome,
    StepOutcome,
)


def line_s(tokens_per_request: float, depth: int) -> float:
    """Step time of a machine for which rows and draft steps are cheap."""
    return 0.01 * (1.0 + 0.1 * tokens_per_request + 0.05 * depth)


@dataclass
class SmallEngine:
    """Requests that never end, one conditional acceptance each."""

    controller: Controller
    acceptance: list[float]
    seconds: Callable[[float, int], float] = line_s
    noise: float = 0.03
    pins: Sequence[int | None] = ()
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    decisions: list[DraftDecision] = field(default_factory=list)
    may_draft: list[bool] = field(default_factory=list)
    context_tokens: int = 500
    sees_shadow_drafts: bool = False
    draws_drafts: bool = False
    """Requests are sampled, and a comparison would say nothing."""
    is_constrained: bool = False
    wave: int = 0
    """Part of the requests' names: another number makes them other requests."""
    rests: bool = False
    """As the scheduler does: up to eight steps without a decision."""
    num_rested: int = 0
    lengths: dict[str, int] = field(default_factory=dict)
    unseen: dict[str, int] = field(default_factory=dict)
    """Tokens that the MTP layers have missed, by request."""

    def requests(self) -> list[DecodeRequest]:
        pins = self.pins or [None] * len(self.acceptance)
        names = [f"r{i}" + f".{self.wave}" * (self.wave > 0) for i in range(len(pins))]
        return [
            DecodeRequest(
                name,
                self.context_tokens,
                not self.draws_drafts,
                pin,
                self.unseen.get(name, 0),
                self.is_constrained,
            )
            for name, pin in zip(names, pins, strict=True)
        ]

    def run(self, num_steps: int, catch_up_token_s: float = 0.0) -> "SmallEngine":
        for _ in range(num_steps):
            self._step(catch_up_token_s)
        return self

    def _step(self, catch_up_token_s: float) -> None:
        requests = self.requests()
        self.may_draft.append(self.controller.may_draft())
        if self.rests and not self.may_draft[-1] and not any(self.lengths.values()):
            self._rest(min(self.controller.num_undecided_steps(), 8))
        decision = self.controller.decide(requests)
        self.decisions.append(decision)
        outcomes = [self._verify(i, r.request_id) for i, r in enumerate(requests)]
        num_draft_tokens = sum(outcome.num_draft_tokens for outcome in outcomes)
        seconds = self.seconds(num_draft_tokens / len(requests), decision.draft_depth)
        caught_up = sum(
            self.unseen.pop(i, 0) for i, k in decision.num_draft_tokens.items() if k
        )
        seconds += caught_up * catch_up_token_s
        self.controller.observe(
            StepOutcome(
                requests=tuple(o for o in outcomes if o.num_draft_tokens),
                num_requests=len(requests),
                num_scheduled_tokens=len(requests) + num_draft_tokens,
                step_time_s=seconds * self.rng.lognormvariate(0, self.noise),
                draft_depth=decision.draft_depth,
                num_decode_requests=len(requests),
                num_context_tokens=self.context_tokens * len(requests),
                num_backfill_tokens=caught_up,
                is_greedy=not self.draws_drafts,
                shadow_drafts=tuple(self._compared(outcomes)),
            )
        )
        for outcome in outcomes:
            if not decision.num_draft_tokens[outcome.request_id]:
                waiting = self.unseen.get(outcome.request_id, 0)
                waiting += outcome.acceptance_length
                self.unseen[outcome.request_id] = waiting
        self.lengths = dict(decision.num_draft_tokens)

    def _rest(self, num_steps: int) -> None:
        size = len(self.acceptance)
        outcome = StepOutcome(
            (),
            num_requests=size,
            num_scheduled_tokens=size,
            step_time_s=self.seconds(0, 0),
            num_decode_requests=size,
            num_context_tokens=self.context_tokens * size,
            is_greedy=not self.draws_drafts,
        )
        for request in self.requests():
            waiting = self.unseen.get(request.request_id, 0)
            self.unseen[request.request_id] = waiting + num_steps
        self.num_rested += num_steps
        self.controller.observe_undecided([outcome] * num_steps)

    def _compared(self, outcomes: Sequence[RequestOutcome]) -> Iterator[RequestOutcome]:
        """Outcomes of drafts that the last decision ordered but not to be verified."""
        if (
            self.sees_shadow_drafts
            and not self.draws_drafts
            and len(self.decisions) > 1
        ):
            for index, outcome in enumerate(outcomes):
                if self.decisions[-2].draft_depth and not outcome.num_draft_tokens:
                    is_same = self.rng.random() < self.acceptance[index]
                    yield RequestOutcome(outcome.request_id, 1, int(is_same))

    def _verify(self, index: int, request_id: str) -> RequestOutcome:
        drafted = self.lengths.get(request_id, 0)
        accepted = 0
        while accepted < drafted and self.rng.random() < self.acceptance[index]:
            accepted += 1
        return RequestOutcome(request_id, drafted, accepted)

    def depths(self, first: int = 0) -> list[int]:
        """Of the steps since ``first`` that explore nothing."""
        return [d.draft_depth for d in self.decisions[first:] if d.reason != "explore"]

    def reasons(self, first: int = 0) -> list[str]:
        return [d.reason for d in self.decisions[first:]]
