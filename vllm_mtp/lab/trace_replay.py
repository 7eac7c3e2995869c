"""Runs a controller in a world and says how far it is from the best.

*Regret* is ``1 - goodput / the oracle's goodput``. Both goodputs are expected ones, a
sum of expected tokens over a sum of noise-free times, taken over the same steps and the
same requests: at every step the oracle decides for those that the controller's run has
brought there. So neither luck in sampling nor noise in times is in the figure, and a
decision is charged with what it causes: verifying in the step after it, drafting in its
own, and the catch-up pass when it resumes drafting (which the oracle is spared).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_mtp.control.controller import Controller
from vllm_mtp.control.fixed import FixedController
from vllm_mtp.control.goodput import GoodputController
from vllm_mtp.control.randomized import RandomController
from vllm_mtp.control.threshold import ThresholdController
from vllm_mtp.lab.synthetic import SyntheticEngine, World
from vllm_mtp.lab.trace_oracle import best_decision, expected, expected_uniform
from vllm_mtp.records import DraftDecision, StepOutcome

CONTROLLERS: Mapping[str, Callable[[int], Controller]] = {
    "goodput": GoodputController,
    "threshold": ThresholdController,
    "random": lambda max_draft_length: RandomController(max_draft_length, 0),
}
"""By name; ``fixed-K`` beside them, K = 0 .. K_max."""


def make_named_controller(name: str, max_draft_length: int) -> Controller:
    """A controller for a replay.

    Raises:
        KeyError: No controller has this name.
    """
    if name.startswith("fixed-") and name[6:].isdigit():
        length = int(name[6:])
        if length <= max_draft_length:
            return FixedController(length)
    return CONTROLLERS[name](max_draft_length)


class Worth:
    """Expected tokens and seconds of one way to decide, step by step."""

    def __init__(self) -> None:
        self.tokens: list[float] = []
        self.seconds: list[float] = []

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens.append(tokens)
        self.seconds.append(seconds)

    def goodput(self, first: int = 0, last: int | None = None) -> float:
        """Tokens per second over the scored steps ``first`` to ``last``."""
        return sum(self.tokens[first:last]) / sum(self.seconds[first:last])


@dataclass
class Replay:
    """What happened, step by step; index 0 is the first step that is scored."""

    world: str
    controller: str
    seed: int
    chosen: Worth = field(default_factory=Worth)
    oracle: Worth = field(default_factory=Worth)
    uniform: list[Worth] = field(default_factory=list)
    """K = 0 .. K_max for every request."""
    depths: list[int] = field(default_factory=list)
    oracle_depths: list[int] = field(default_factory=list)
    mean_lengths: list[float] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    committed_tokens: int = 0
    elapsed_s: float = 0.0
    """Simulated, with noise."""

    def regret(self, first: int = 0, last: int | None = None) -> float:
        """Fraction of the oracle's goodput that was missed over some steps."""
        return 1 - self.chosen.goodput(first, last) / self.oracle.goodput(first, last)

    def over_uniform(
        self, draft_length: int, first: int = 0, last: int | None = None
    ) -> float:
        """Goodput over that of always drafting ``draft_length`` tokens."""
        baseline = self.uniform[draft_length].goodput(first, last)
        return self.chosen.goodput(first, last) / baseline

    def num_switches(self, first: int = 0) -> int:
        """Changes of the depth, probes left out."""
        depths = [
            depth
            for depth, reason in zip(
                self.depths[first:], self.reasons[first:], strict=True
            )
            if reason != "probe"
        ]
        return sum(a != b for a, b in zip(depths, depths[1:], strict=False))

    def share_of_probes(self, first: int = 0) -> float:
        """Of steps."""
        return self.reasons[first:].count("probe") / len(self.reasons[first:])

    @property
    def realised_goodput(self) -> float:
        """Tokens per second as drawn, noise, spikes and prefill included."""
        return self.committed_tokens / self.elapsed_s


class _Scorer:
    """Charges each decision when its drafts are verified."""

    def __init__(self, world: World, replay: Replay) -> None:
        self.world, self.replay = world, replay
        self._pending: tuple[DraftDecision, float] | None = None
        replay.uniform = [Worth() for _ in range(world.max_draft_length + 1)]

    def score(self, engine: SyntheticEngine) -> None:
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
        replay.depths.append(decision.draft_depth)
        replay.oracle_depths.append(best.depth)
        replay.reasons.append(decision.reason)
        lengths = decision.num_draft_tokens.values()
        replay.mean_lengths.append(sum(lengths) / max(len(lengths), 1))

    def note(self, decision: DraftDecision, resume_s: float) -> None:
        """What was decided in the step that runs now."""
        self._pending = (decision, resume_s)


Listener = Callable[[DraftDecision, StepOutcome], None]


def replay(
    world: World,
    controller: Controller,
    num_steps: int,
    seed: int = 0,
    name: str = "",
    listener: Listener | None = None,
) -> Replay:
    """Run a controller.

    Args:
        world: Load and machine.
        controller: A fresh one.
        num_steps: Engine steps.
        seed: Of requests, acceptance and noise.
        name: Of the controller, for the report.
        listener: Gets each step's decision and outcome, as a trace writer does.
    """
    engine = SyntheticEngine(world, seed)
    result = Replay(world.name, name, seed)
    scorer = _Scorer(world, result)
    for _ in range(num_steps):
        requests = engine.begin()
        scorer.score(engine)
        decision = controller.decide(requests)
        scorer.note(decision, engine.resume_s(decision.draft_depth))
        outcome, heard = engine.step(decision)
        if listener is not None:
            listener(decision, outcome)
        for late in heard:
            controller.observe(late)
        result.committed_tokens += (
            outcome.num_decode_requests + outcome.num_accepted_tokens
        )
        result.elapsed_s += outcome.step_time_s
    return result


def depth_histogram(depths: list[int], max_draft_length: int) -> NDArray[Any]:
    """Steps at each depth, 0 .. K_max."""
    counts: NDArray[Any] = np.bincount(depths, minlength=max_draft_length + 1)
    return counts
