"""What is believed of each class of requests: probabilities, from what was learned.

The model is that of `survival`, which learns: profile of the cell, drift, and what the
class says of a request's own shift and of its late shift.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from benchmarks.control.previous.confidence import ConfidenceModel
from benchmarks.control.previous.profiles import (
    Profile,
    Profiles,
    regime_of,
    sibling_of,
)
from benchmarks.control.previous.request_memory import cell_of_class, shifts_of_class
from vllm_mtp.acceptance import logistic
from vllm_mtp.records import DraftChances


class Beliefs:
    """Answers by class; see `RequestState.class_id`."""

    def __init__(
        self, max_draft_length: int, prior: Sequence[float], prior_precision: float
    ) -> None:
        """Begin with a prior.

        Args:
            max_draft_length: K_max.
            prior: Conditional acceptance by position; the last one repeats.
            prior_precision: Of its log-odds.
        """
        self.max_draft_length = max_draft_length
        self.drift = 0.0
        """What all requests have in common beyond their profiles, log-odds."""
        self.drift_precision = 4.0
        self.confidences: dict[int, ConfidenceModel] = {}
        """Of each regime seen so far."""
        self._profiles = Profiles(max_draft_length, prior, prior_precision)

    def conditional_of_class(
        self, class_id: int, num_positions: int | None = None
    ) -> list[float]:
        """``p_1`` .. ``p_K_max`` of a class, or the first few of them."""
        first, later, profile = self._log_odds(class_id)
        confidence = self._confidence(class_id)
        dampings, bias = confidence.dampings, confidence.first_bias
        logits = profile.logits[:num_positions]
        result = [
            logistic(damping * (later + logit))
            for logit, damping in zip(logits, dampings, strict=False)
        ]
        result[0] = logistic(dampings[0] * (first + logits[0]) + bias)
        return result

    def log_odds_of_class(self, class_id: int) -> list[float]:
        """Of each position, for a draft token of usual confidence."""
        first, later, profile = self._log_odds(class_id)
        result = [later + logit for logit in profile.logits]
        result[0] = first + profile.logits[0]
        return result

    def survival_of_class(self, class_id: int) -> list[float]:
        """``S_1`` .. ``S_K_max`` of a class."""
        return list(accumulate(self.conditional_of_class(class_id), mul))

    def optimistic_survival_of_class(
        self, class_id: int, deviations: float, num_known: int
    ) -> list[float]:
        """As high as survival may well be where it is not being observed.

        Args:
            class_id: The class.
            deviations: How many standard deviations to allow for.
            num_known: Positions that are drafted anyway. If there are any, the drift
                is being observed, too.
        """
        first, later, profile = self._log_odds(class_id)
        drift_variance = 0.0 if num_known else 1.0 / self.drift_precision
        confidence = self._confidence(class_id)
        dampings, bias = confidence.dampings, confidence.first_bias
        alive, result = 1.0, []
        for position, logit in enumerate(profile.logits):
            log_odds_here = logit + (later if position else first)
            if position >= num_known:
                variance = drift_variance + 1.0 / profile.precisions[position]
                log_odds_here += deviations * math.sqrt(variance)
            alive *= logistic(log_odds_here * dampings[position] + bias)
            result.append(alive)
            bias = 0.0
        return result

    def _log_odds(self, class_id: int) -> tuple[float, float, Profile]:
        """What a class adds to its profile: at the first position, after it."""
        shift, late = shifts_of_class(class_id)
        first = self.drift + shift
        return first, first + late, self._profiles.of(cell_of_class(class_id))

    def chances_of_class(self, class_id: int, depth: int) -> DraftChances:
        """What is believed of a class's first ``depth`` draft tokens."""
        confidence = self._confidence(class_id)
        usual = self.log_odds_of_class(class_id)[:depth]
        offsets = confidence.offsets([0.0] * depth)
        return DraftChances(
            [a + b for a, b in zip(usual, offsets, strict=True)],
            confidence.slope,
            self.conditional_of_class(class_id, depth),
        )

    def confidence_offsets(self, class_id: int) -> list[float]:
        """What the confidence of a class's next draft token may add to its log-odds."""
        return self._confidence(class_id).usual_offsets()

    def _confidence(self, class_id: int) -> ConfidenceModel:
        return self._confidence_in(cell_of_class(class_id))

    def _confidence_in(self, cell: int) -> ConfidenceModel:
        regime = regime_of(cell)
        found = self.confidences.get(regime)
        if found is None:
            known = self.confidences.get(sibling_of(regime))
            found = (
                ConfidenceModel(self.max_draft_length)
                if known is None
                else known.of_strangers()
            )
            self.confidences[regime] = found
        return found
