"""Runs a controller in a world and says how far it is from the best.

*Regret* is the share of the time that was wasted: ``1 - t* / t``, where ``t`` is the
time of the controller's steps and ``t*`` the time in which the oracle commits the same
tokens, at the goodput that it has at each step. With a goodput that never changes that
is ``1 - goodput / the oracle's``; where it does (phases, load), a ratio of total
goodputs would reward spending more time in the good parts, which no load allows.

Tokens are expected ones and times free of noise, over the same steps and the same
requests: at every step the oracle decides for those that the controller's run has
brought there. So neither luck in sampling nor noise in times is in the figure, and a
decision is charged with what it causes: verifying in the step after it, drafting in its
own, and the catch-up pass when it resumes drafting (which the oracle is spared).
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks.control.trace_oracle import best_decision, expected, expected_uniform
from benchmarks.control.trace_world import Engine, ReplayWorld
from vllm_mtp.config import ConfigError
from vllm_mtp.control.controller import Controller
from vllm_mtp.control.fixed import FixedController
from vllm_mtp.control.goodput import GoodputController
from vllm_mtp.control.options import GoodputOptions
from vllm_mtp.control.randomized import RandomController
from vllm_mtp.control.threshold import ThresholdController
from vllm_mtp.records import DraftDecision

CONTROLLERS: Mapping[str, Callable[[int, bool], Controller]] = {
    "goodput": lambda max_draft_length, sees_shadow_drafts: GoodputController(
        max_draft_length, GoodputOptions(sees_shadow_drafts=sees_shadow_drafts)
    ),
    "threshold": lambda max_draft_length, _: ThresholdController(max_draft_length),
    "random": lambda max_draft_length, _: RandomController(max_draft_length, 0),
}
"""By name; ``fixed-K`` beside them, K = 0 .. K_max."""


def make_named_controller(
    name: str, max_draft_length: int, sees_shadow_drafts: bool = False
) -> Controller:
    """A controller for a replay.

    Args:
        name: Of ``CONTROLLERS``, or ``fixed-K``.
        max_draft_length: Upper bound on K.
        sees_shadow_drafts: What the world says of itself.

    Raises:
        ConfigError: No controller has this name.
    """
    if name.startswith("fixed-") and name[6:].isdecimal():
        length = int(name[6:])
        if length <= max_draft_length:
            return FixedController(length)
    if name not in CONTROLLERS:
        raise ConfigError(
            f"controller {name!r} does not exist: use {', '.join(CONTROLLERS)} or "
            f"fixed-K with K from 0 to {max_draft_length}."
        )
    return CONTROLLERS[name](max_draft_length, sees_shadow_drafts)


class Worth:
    """Expected tokens and seconds of one way to decide, step by step."""

    def __init__(self) -> None:
        self.tokens: list[float] = []
        self.seconds: list[float] = []

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens.append(tokens)
        self.seconds.append(seconds)

    def total_s(self, first: int = 0, last: int | None = None) -> float:
        """Time of the scored steps ``first`` to ``last``."""
        return sum(self.seconds[first:last])

    def seconds_for(
        self, tokens: list[float], first: int = 0, last: int | None = None
    ) -> float:
        """Time to commit so many tokens at each step, at this way's goodput there."""
        return sum(
            wanted * seconds / own
            for wanted, own, seconds in zip(
                tokens[first:last],
                self.tokens[first:last],
                self.seconds[first:last],
                strict=True,
            )
        )


@dataclass
class Replay:
    """What happened, step by step; index 0 is the first step that is scored.

    Steps in which no request decodes are not scored.
    """

    world: str
    controller: str
    seed: int
    chosen: Worth = field(default_factory=Worth)
    oracle: Worth = field(default_factory=Worth)
    uniform: list[Worth] = field(default_factory=list)
    """K = 0 .. K_max for every request."""
    steps: list[int] = field(default_factory=list)
    """Number of each scored step."""
    depths: list[int] = field(default_factory=list)
    oracle_depths: list[int] = field(default_factory=list)
    mean_lengths: list[float] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    committed_tokens: int = 0
    elapsed_s: float = 0.0
    """Simulated, with noise."""

    def regret(self, first: int = 0, last: int | None = None) -> float:
        """Share of the time over some steps that the oracle would not have needed."""
        needed_s = self.oracle.seconds_for(self.chosen.tokens, first, last)
        return 1 - needed_s / self.chosen.total_s(first, last)

    def regret_after(self, step: int, num_steps: int) -> float | None:
        """Regret from a step on; None where fewer than ``num_steps`` follow it."""
        if not self.steps or self.steps[-1] < step + num_steps - 1:
            return None
        first = bisect_left(self.steps, step)
        return self.regret(first, bisect_left(self.steps, step + num_steps))

    def over_uniform(
        self, draft_length: int, first: int = 0, last: int | None = None
    ) -> float:
        """Speed over always drafting ``draft_length`` tokens, for the same tokens."""
        baseline = self.uniform[draft_length]
        needed_s = baseline.seconds_for(self.chosen.tokens, first, last)
        return needed_s / self.chosen.total_s(first, last)

    def best_uniform(self) -> int:
        """The draft length that would have been the best, never changed."""
        return min(range(len(self.uniform)), key=self.over_uniform)

    def num_switches(self, first: int = 0) -> int:
        """Changes of the depth, explorations left out."""
        depths = [
            depth
            for depth, reason in zip(
                self.depths[first:], self.reasons[first:], strict=True
            )
            if reason != "explore"
        ]
        return sum(a != b for a, b in pairwise(depths))

    def share_of_exploration(self, first: int = 0) -> float:
        """Of steps."""
        return self.reasons[first:].count("explore") / len(self.reasons[first:])

    @property
    def realised_goodput(self) -> float:
        """Tokens per second as drawn, noise, spikes and prefill included."""
        return self.committed_tokens / self.elapsed_s


class _Scorer:
    """Charges each decision when its drafts are verified."""

    def __init__(self, world: ReplayWorld, replay: Replay) -> None:
        self.world, self.replay = world, replay
        self._pending: tuple[DraftDecision, float] | None = None
        replay.uniform = [Worth() for _ in range(world.max_draft_length + 1)]

    def score(self, step: int, engine: Engine) -> None:
        """To be called before a step runs."""
        truth = engine.truth()
        if self._pending is None or not truth.num_requests:
            return
        decision, resume_s = self._pending
        replay, cost = self.replay, self.world.cost
        worth = expected(truth, cost, decision)
        replay.chosen.add(worth.tokens, worth.seconds + resume_s)
        best = best_decision(truth, cost)
        replay.oracle.add(best.tokens, best.seconds)
        for kept, value in zip(
            replay.uniform, expected_uniform(truth, cost), strict=True
        ):
            kept.add(value.tokens, value.seconds)
        replay.steps.append(step)
        replay.depths.append(decision.draft_depth)
        replay.oracle_depths.append(best.depth)
        replay.reasons.append(decision.reason)
        lengths = decision.num_draft_tokens.values()
        replay.mean_lengths.append(sum(lengths) / max(len(lengths), 1))

    def note(self, decision: DraftDecision, resume_s: float) -> None:
        """What was decided in the step that runs now."""
        self._pending = (decision, resume_s)


def replay(
    world: ReplayWorld,
    controller: Controller,
    num_steps: int,
    seed: int = 0,
    name: str = "",
) -> Replay:
    """Run a controller.

    Args:
        world: Load and machine.
        controller: A fresh one.
        num_steps: Engine steps.
        seed: Of requests, acceptance and noise.
        name: Of the controller, for the report.
    """
    engine = world.start(seed)
    result = Replay(world.name, name, seed)
    scorer = _Scorer(world, result)
    for step in range(num_steps):
        requests = engine.begin()
        scorer.score(step, engine)
        may_draft = controller.may_draft()
        decision = controller.decide(requests)
        assert may_draft or not decision.draft_depth, decision
        scorer.note(decision, engine.resume_s(decision.draft_depth))
        outcome, heard = engine.step(decision)
        for late in heard:
            controller.observe(late)
        result.committed_tokens += (
            outcome.num_decode_requests + outcome.num_accepted_tokens
        )
        result.elapsed_s += outcome.step_time_s
    return result
