"""The best decision, for whoever knows the truth.

For each depth the oracle orders the draft tokens of all requests by their true survival
and takes as many of them as maximise expected tokens over expected time; over the
depths it takes the best. That is the most that a step's goodput can be, given the
requests, so no controller is better in expectation.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.control.trace_world import CostCurve, Truth
from vllm_mtp.records import DraftDecision


class Expected(NamedTuple):
    """What a decision is worth."""

    tokens: float
    """Expected committed tokens."""
    seconds: float
    """Expected time of drafting and verifying, no noise."""
    depth: int

    @property
    def goodput(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def expected(truth: Truth, cost: CostCurve, decision: DraftDecision) -> Expected:
    """Value of any decision."""
    lengths = np.array(
        [decision.num_draft_tokens.get(i, 0) for i in truth.request_ids], dtype=int
    )
    positions = np.arange(truth.survival.shape[1])
    drafted = positions < lengths[:, None]
    tokens = truth.num_requests + float((truth.survival * drafted).sum())
    is_uniform = bool((lengths == lengths[0]).all())
    rows = np.array([truth.num_requests + lengths.sum()])
    return Expected(
        tokens,
        float(cost.verify_s(truth.num_requests, rows, truth.context, is_uniform)[0])
        + cost.draft_s(truth.num_requests, decision.draft_depth, truth.context),
        decision.draft_depth,
    )


def expected_uniform(truth: Truth, cost: CostCurve) -> list[Expected]:
    """Value of K = 0, 1, ..., K_max for all requests."""
    num_requests, max_draft_length = truth.survival.shape
    lengths = np.arange(max_draft_length + 1)
    seconds = cost.verify_s(
        num_requests, num_requests * (1 + lengths), truth.context, is_uniform=True
    )
    gained = np.concatenate([[0.0], truth.survival.sum(axis=0)]).cumsum()
    return [
        Expected(
            num_requests + float(gained[k]),
            float(seconds[k]) + cost.draft_s(num_requests, int(k), truth.context),
            int(k),
        )
        for k in lengths
    ]


def best_decision(truth: Truth, cost: CostCurve) -> Expected:
    """The oracle's."""
    num_requests, max_draft_length = truth.survival.shape
    uniform = expected_uniform(truth, cost)
    best = max(uniform, key=lambda value: value.goodput)
    if num_requests == 1:
        return best
    rows = num_requests + np.arange(1, num_requests * max_draft_length + 1)
    verify = cost.verify_s(num_requests, rows, truth.context, is_uniform=False)
    for depth in range(1, max_draft_length + 1):
        marginals: NDArray[Any] = np.sort(truth.survival[:, :depth], axis=None)[::-1]
        tokens = num_requests + marginals.cumsum()
        draft = cost.draft_s(num_requests, depth, truth.context)
        seconds = verify[: len(tokens)] + draft
        index = int(np.argmax(tokens / seconds))
        found = Expected(float(tokens[index]), float(seconds[index]), depth)
        best = max(best, found, key=lambda value: value.goodput)
    return best
