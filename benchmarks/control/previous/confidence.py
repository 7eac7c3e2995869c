"""What a draft token's own confidence says about its acceptance.

The confidence of a draft token is the logit of the proposal's first choice minus that
of its second: 0 where both are equally likely. It is known before anything is
verified, and it says more about a single token than the past of its request does::

    log-odds of p_ij = (see `survival`) + slope (confidence - centre of position j)

``centre`` is the running mean, so the rest of the model is about drafts of usual
confidence. Before a token is drafted its confidence is unknown: then the log-odds are
damped (MacKay's approximation of a logistic averaged over a normal).

That mean is a guess: confidences are not normal, and after a change of the load their
centre and spread are those of before. So for the first position, which every draft has,
what is guessed without the confidence is corrected (``first_bias``) by what happens.
Without it drafting promised up to a fifth more than it kept, on texts with few accepted
tokens after texts with many.
"""

import math
from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from typing import Self

from vllm_mtp.acceptance import MAX_CONFIDENCE

_HALF_LIFE = 512.0
"""Drafts after which what is known of centres and the slope counts half."""
_FORGET = math.log(2) / _HALF_LIFE
_PRIOR_SLOPE = 1.0
"""As if the proposal were calibrated and its second choice the only other one."""
_PRIOR_PRECISION = 4.0
_MAX_SLOPE = 4.0
_BIAS_HALF_LIFE = 256.0
_BIAS_FORGET = math.log(2) / _BIAS_HALF_LIFE
_MAX_BIAS = 2.0
_WORTH_OF_STRANGERS = 16.0
"""Drafts that what another kind of request has taught counts for."""
_NUM_RECENT = 64
_NUM_QUANTILES = 4
_FEWEST_RECENT = 16
"""Drafts that tell how confidences of first tokens are spread."""


def sane(confidences: tuple[float, ...], num_drafted: int) -> tuple[float, ...]:
    """Confidences that cover a draft, or none: broken weights give NaN."""
    if len(confidences) < num_drafted or not all(c >= 0.0 for c in confidences):
        return ()
    return confidences


class ConfidenceModel:
    """Learns slope and usual confidence of each position."""

    def __init__(self, max_draft_length: int) -> None:
        self.slope = _PRIOR_SLOPE
        self._precision = _PRIOR_PRECISION
        # [K_max] each
        self.centres = [0.0] * max_draft_length
        self._variances = [0.0] * max_draft_length
        self._counts = [0.0] * max_draft_length
        self.dampings = [1.0] * max_draft_length
        """Factor of a position's log-odds while its confidence is unknown."""
        self.first_bias = 0.0
        """Then added to the damped log-odds of the first position."""
        self._bias_precision = _PRIOR_PRECISION
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)
        """Of first tokens."""

    def of_strangers(self) -> Self:
        """What is believed of another kind of request before its first draft."""
        copied = deepcopy(self)
        copied._precision = min(self._precision, _WORTH_OF_STRANGERS)
        copied._bias_precision = min(self._bias_precision, _WORTH_OF_STRANGERS)
        copied._counts = [min(c, _WORTH_OF_STRANGERS) for c in self._counts]
        return copied

    def offsets(self, confidences: Sequence[float]) -> list[float]:
        """What confidences add to the log-odds of their positions."""
        return [
            self.slope * (min(c, MAX_CONFIDENCE) - centre)
            for c, centre in zip(confidences, self.centres, strict=False)
        ]

    def usual_offsets(self) -> list[float]:
        """What the confidence of a first token may add, equally likely values.

        Quantiles of those seen lately, rising: between easy and hard texts confidences
        are far from normal. Empty while too few were seen.
        """
        if len(self._recent) < _FEWEST_RECENT:
            return []
        known, centre = sorted(self._recent), self.centres[0]
        step = len(known) / _NUM_QUANTILES
        quantiles = [known[int((i + 0.5) * step)] for i in range(_NUM_QUANTILES)]
        return [self.slope * (min(c, MAX_CONFIDENCE) - centre) for c in quantiles]

    def note(self, confidences: Sequence[float]) -> None:
        """Learn what is usual from one request's drafted tokens, verified or not."""
        self._recent.extend(confidences[:1])
        for position, confidence in enumerate(confidences[: len(self.centres)]):
            count = min(self._counts[position] + 1.0, 1.0 / _FORGET)
            self._counts[position] = count
            away = min(confidence, MAX_CONFIDENCE) - self.centres[position]
            self.centres[position] += away / count
            variance = self._variances[position]
            variance += ((1.0 - 1.0 / count) * away * away - variance) / count
            self._variances[position] = variance
            spread = self.slope * self.slope * variance
            self.dampings[position] = 1.0 / math.sqrt(1.0 + math.pi / 8.0 * spread)

    def learn(
        self,
        probabilities: Sequence[float],
        num_accepted: int,
        confidences: Sequence[float],
    ) -> None:
        """Learn the slope from one draft.

        Args:
            probabilities: Of acceptance, as expected, of each examined position.
            num_accepted: Accepted draft tokens.
            confidences: Of the draft tokens, in order.
        """
        score = information = 0.0
        for position, p in enumerate(probabilities[: len(confidences)]):
            away = min(confidences[position], MAX_CONFIDENCE) - self.centres[position]
            score += ((position < num_accepted) - p) * away
            information += p * (1.0 - p) * away * away
        back = _FORGET * _PRIOR_PRECISION
        self._precision += information + back - _FORGET * self._precision
        slope = (
            self.slope + (score - back * (self.slope - _PRIOR_SLOPE)) / self._precision
        )
        self.slope = min(max(slope, 0.0), _MAX_SLOPE)

    def learn_first(
        self, probability: float, num_accepted: int, num_drafts: int
    ) -> None:
        """Learn what first draft tokens are worth before they are drafted.

        Args:
            probability: Of their acceptance, as expected without their confidence.
            num_accepted: So many were.
            num_drafts: Of so many, whatever their confidences: a draft that was only
                looked at because it seemed good says nothing about the others.
        """
        information = num_drafts * probability * (1.0 - probability)
        forget = 1.0 - (1.0 - _BIAS_FORGET) ** num_drafts
        back = forget * _PRIOR_PRECISION
        self._bias_precision += information + back - forget * self._bias_precision
        score = num_accepted - num_drafts * probability - back * self.first_bias
        bias = self.first_bias + score / self._bias_precision
        self.first_bias = min(max(bias, -_MAX_BIAS), _MAX_BIAS)
