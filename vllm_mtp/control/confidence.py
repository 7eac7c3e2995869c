"""What a draft token's own confidence says about its acceptance.

The confidence of a draft token is the logit of the proposal's first choice minus that
of its second. It is known before anything is verified::

    log-odds of p_ij = (see `survival`) + slope (confidence - centre[j])

``centre`` is the running mean. Before a token is drafted its confidence is unknown, so
its chance is the mean over `usual_offsets`: quantiles of the confidences seen lately.
"""

from collections import deque
from collections.abc import Sequence

from vllm_mtp.acceptance import MAX_CONFIDENCE

PRIOR_SLOPE = 1.0
"""Log-odds per unit of confidence if the proposal is calibrated and its second choice
the only other one; a precision of 4, some dozens of drafts."""
NUM_RECENT = 64
"""Drafts whose confidences make the quantiles; a fourth before there are any. Centres
and the slope belong to the model, not to the load: they count eight times as long."""
NUM_QUANTILES = 4
"""Equally likely values; more change what drafting is worth by less than a percent."""

_FORGET = 1.0 / (8 * NUM_RECENT)
_PRECISION = 4.0 * PRIOR_SLOPE


def sane(confidences: tuple[float, ...], num_drafted: int) -> tuple[float, ...]:
    """Confidences that cover a draft, or none: broken weights give NaN."""
    if len(confidences) < num_drafted or not all(c >= 0.0 for c in confidences):
        return ()
    return confidences


class ConfidenceModel:
    """Learns slope and usual confidence of each position."""

    def __init__(self, max_draft_length: int) -> None:
        self.slope = PRIOR_SLOPE
        # [K_max]
        self.centres = [0.0] * max_draft_length
        self._precision = _PRECISION
        self._counts = [0.0] * max_draft_length
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)
        """Of first tokens."""
        self._usual: list[float] | None = None

    def offsets(self, confidences: Sequence[float]) -> list[float]:
        """What confidences add to the log-odds of their positions."""
        return [
            self.slope * (min(c, MAX_CONFIDENCE) - centre)
            for c, centre in zip(confidences, self.centres, strict=False)
        ]

    def usual_offsets(self) -> list[float]:
        """What the confidence of a draft token may add, equally likely values.

        Empty while too few were seen.
        """
        if len(self._recent) < NUM_RECENT // 4:
            return []
        if self._usual is None:
            known, step = sorted(self._recent), len(self._recent) / NUM_QUANTILES
            usual = [known[int((i + 0.5) * step)] for i in range(NUM_QUANTILES)]
            self._usual = [u - self.centres[0] for u in usual]
        return [self.slope * usual for usual in self._usual]

    def note(self, confidences: Sequence[float], num_drafts: int = 1) -> None:
        """Learn what is usual from drafted tokens, verified or not.

        Args:
            confidences: Of a draft, at least one.
            num_drafts: So many drafts had the same.
        """
        self._usual = None
        self._recent.extend([min(confidences[0], MAX_CONFIDENCE)] * num_drafts)
        for position, confidence in enumerate(confidences[: len(self.centres)]):
            count = min(self._counts[position] + num_drafts, 1.0 / _FORGET)
            self._counts[position] = count
            away = min(confidence, MAX_CONFIDENCE) - self.centres[position]
            self.centres[position] += min(num_drafts / count, 1.0) * away

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
        for position, p in enumerate(probabilities):
            away = min(confidences[position], MAX_CONFIDENCE) - self.centres[position]
            score += ((position < num_accepted) - p) * away
            information += p * (1.0 - p) * away * away
        back = _FORGET * _PRECISION
        self._precision += information + back - _FORGET * self._precision
        slope = (
            self.slope + (score - back * (self.slope - PRIOR_SLOPE)) / self._precision
        )
        self.slope = min(max(slope, 0.0), MAX_CONFIDENCE)
