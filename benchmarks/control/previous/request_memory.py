"""What is known of a single request, and how long it counts.

In some loads a request keeps its character (translations beside code), in others its
easy stretches end as they came (a copied passage, a loop), and who trusts them is
always late. No single memory suits both, so each of `MEMORIES` follows a few running
requests, and the one that has predicted them better lately is used for all.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from vllm_mtp.acceptance import logistic
from vllm_mtp.records import RequestOutcome

LEVEL_WIDTH = 0.5
MAX_SHIFT = 5.0
NUM_LEVELS = 2 * round(MAX_SHIFT / LEVEL_WIDTH) + 1
MEAN_LEVEL = NUM_LEVELS // 2
"""Shifts are quantised, so that requests fall into few classes: a class is
``(cell * NUM_LEVELS + level of the shift) * NUM_LEVELS + level of the late shift``."""

_LEAD_HALF_LIFE_STEPS = 400.0
_NEEDED_LEAD = 3.0
"""Log-likelihood by which the other memory must have been better."""
_NUM_WATCHED = 4
_LEAST = 1e-6
"""No memory is judged by a single draft that it held impossible."""
_MAX_ABSENCE_STEPS = 16
"""A watched request of which nothing is heard for so long is given up."""


class Memory(NamedTuple):
    """How long a request's past counts, and how much it may differ from the mean."""

    half_life_steps: float
    """Of what was seen of a request; its text goes on, drafted for or not."""
    max_shift_variance: float
    """Most spread among requests that is believed, log-odds squared."""
    max_late_variance: float
    """The same of what they do differently after the first position."""


MEMORIES = (Memory(16.0, 0.5, 0.1), Memory(128.0, 1.5, 0.3))
"""Short and long; the first one is used until another is better. The short one did well
on recorded texts (8 drafts did a little better there, and worse after changes), the
long one where requests are of different kinds (trace lab)."""


def cell_of_class(class_id: int) -> int:
    """Cell of a class."""
    return class_id // (NUM_LEVELS * NUM_LEVELS)


def shifts_of_class(class_id: int) -> tuple[float, float]:
    """Shift and late shift of a class, log-odds."""
    rest, late_level = divmod(class_id, NUM_LEVELS)
    level = rest % NUM_LEVELS
    return (level - MEAN_LEVEL) * LEVEL_WIDTH, (late_level - MEAN_LEVEL) * LEVEL_WIDTH


def class_of_mean(cell: int) -> int:
    """Class of a request like the mean of its cell."""
    return (cell * NUM_LEVELS + MEAN_LEVEL) * NUM_LEVELS + MEAN_LEVEL


class Prior(NamedTuple):
    """What is believed of a request before its first outcome."""

    shift_precision: float
    late_precision: float
    keep: float
    """Part of the information that is left after a step."""


class Evidence(NamedTuple):
    """What K drafted and A accepted say: gradient and curvature of their likelihood."""

    score: float
    information: float
    late_score: float
    """The part of the positions after the first."""
    late_information: float
    # [num examined positions]
    probabilities: tuple[float, ...]


def evidence_of(probabilities: tuple[float, ...], num_accepted: int) -> Evidence:
    """Evidence of one draft.

    Args:
        probabilities: Conditional acceptance of the examined positions, in order.
        num_accepted: Accepted draft tokens.
    """
    score, information = float(num_accepted), 1e-6
    for p in probabilities:
        score -= p
        information += p * (1.0 - p)
    first = probabilities[0]
    return Evidence(
        score,
        information,
        score - ((num_accepted > 0) - first),
        information - first * (1.0 - first),
        probabilities,
    )


class RequestState:
    """What is known of one request."""

    __slots__ = (
        "cell",
        "heard_at_step",
        "late",
        "late_precision",
        "precision",
        "shift",
    )

    def __init__(self, cell: int, prior: Prior, now_step: int = 0) -> None:
        self.cell = cell
        self.heard_at_step = now_step
        """Step after which something was learned of it last."""
        self.shift = 0.0
        self.precision = prior.shift_precision
        self.late = 0.0
        self.late_precision = prior.late_precision

    @property
    def class_id(self) -> int:
        level = round((self.shift + MAX_SHIFT) / LEVEL_WIDTH)
        late_level = round((self.late + MAX_SHIFT) / LEVEL_WIDTH)
        return (self.cell * NUM_LEVELS + level) * NUM_LEVELS + late_level

    def steps_since(self, step: int) -> int:
        """From the last draft to the first one after a step, at least 1."""
        return max(step - self.heard_at_step, 0) + 1

    def learn(
        self, evidence: Evidence, moved: float, prior: Prior, num_steps: int = 1
    ) -> None:
        """Learn from a draft.

        Args:
            evidence: Of the draft.
            moved: By how much the drift has moved by it: explained already.
            prior: What is forgotten is replaced by it, so that a request without news
                returns to the running mean.
            num_steps: Since the draft before it.
        """
        keep = prior.keep**num_steps
        back = (1.0 - keep) * prior.shift_precision
        information = evidence.information
        self.precision = keep * self.precision + information + back
        score = evidence.score - information * moved
        step = (score - back * self.shift) / self.precision
        self.shift = min(max(self.shift + step, -MAX_SHIFT), MAX_SHIFT)
        information = evidence.late_information
        if information <= 1e-5:
            return
        back = (1.0 - keep) * prior.late_precision
        self.late_precision = keep * self.late_precision + information + back
        # What the shift explains now is not explained twice.
        left = evidence.late_score - information * (moved + step)
        late = self.late + (left - back * self.late) / self.late_precision
        self.late = min(max(late, -MAX_SHIFT), MAX_SHIFT)


class _Watched:
    """One request as each memory sees it."""

    __slots__ = ("heard_at_step", "states")

    def __init__(self, priors: Sequence[Prior], now_step: int) -> None:
        self.states = [RequestState(0, prior) for prior in priors]
        self.heard_at_step = now_step


class MemoryChoice:
    """Finds out which memory predicts better."""

    def __init__(self, memories: Sequence[Memory] = MEMORIES) -> None:
        """Begin with the first.

        Args:
            memories: One, which is then always used, or two.
        """
        self.memories = tuple(memories)
        self.current = self.memories[0]
        self.lead = 0.0
        """Log-likelihood of the second minus that of the first, recent steps only."""
        self._watched: dict[str, _Watched] = {}
        self._num_steps = 0
        self._forget = 0.5 ** (1.0 / _LEAD_HALF_LIFE_STEPS)

    def begin_step(
        self, outcomes: Sequence[RequestOutcome], priors: Sequence[Prior]
    ) -> Sequence[RequestOutcome]:
        """Returns the outcomes to `compare`: those of watched requests.

        Args:
            outcomes: Of a step, with drafts.
            priors: Of each memory, for requests that begin to be watched.
        """
        if len(self.memories) == 1:
            return ()
        self._num_steps += 1
        self.lead *= self._forget
        if len(self._watched) < _NUM_WATCHED:
            for outcome in outcomes[: 2 * _NUM_WATCHED]:
                self._watch(outcome.request_id, priors)
        elif self._num_steps % _MAX_ABSENCE_STEPS == 0:
            self._give_up_absent()
        watched = self._watched
        return [outcome for outcome in outcomes if outcome.request_id in watched]

    def _watch(self, request_id: str, priors: Sequence[Prior]) -> None:
        if len(self._watched) < _NUM_WATCHED and request_id not in self._watched:
            self._watched[request_id] = _Watched(priors, self._num_steps)

    def _give_up_absent(self) -> None:
        oldest = self._num_steps - _MAX_ABSENCE_STEPS
        self._watched = {
            request_id: watched
            for request_id, watched in self._watched.items()
            if watched.heard_at_step >= oldest
        }

    def compare(
        self,
        outcome: RequestOutcome,
        logits: Sequence[float],
        priors: Sequence[Prior],
        num_steps: int,
    ) -> None:
        """Judge all memories by a watched request's draft, then let them learn.

        Args:
            outcome: Of `begin_step`.
            logits: Log-odds of its examined positions for a request like the mean.
            priors: Of each memory.
            num_steps: Since the request's draft before it.
        """
        watched = self._watched[outcome.request_id]
        watched.heard_at_step = self._num_steps
        accepted = min(max(outcome.num_accepted_tokens, 0), len(logits))
        chances = []
        for state, prior in zip(watched.states, priors, strict=True):
            probabilities, chance = _predicted(state, logits, accepted)
            chances.append(chance)
            evidence = evidence_of(probabilities, accepted)
            state.learn(evidence, 0.0, prior, num_steps)
        self.lead += math.log(chances[1] / chances[0])
        if abs(self.lead) > _NEEDED_LEAD:
            self.current = self.memories[self.lead > 0]


def _predicted(
    state: RequestState, logits: Sequence[float], num_accepted: int
) -> tuple[tuple[float, ...], float]:
    """Chances of a request's draft tokens, and that of what came of them."""
    probabilities, chance, added = [], 1.0, state.shift
    for position, logit in enumerate(logits):
        p = logistic(logit + added)
        added = state.shift + state.late
        probabilities.append(p)
        chance *= max(p if position < num_accepted else 1.0 - p, _LEAST)
    return tuple(probabilities), chance
