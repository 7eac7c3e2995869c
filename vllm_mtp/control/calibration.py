"""Whether what is given a chance of 60 % happens 60 times in 100.

The expected calibration error (Naeini et al., 2015) over tenths of probability, of the
draft tokens that the target verified lately.
"""

from collections.abc import Sequence

_NUM_BINS = 10
_MAX_TOKENS = 8192.0
"""Verified tokens after which all counts are halved: the past fades."""


class Calibration:
    """Chances that were given, and what came of them."""

    def __init__(self) -> None:
        """Nothing is known."""
        self._expected = [0.0] * _NUM_BINS
        self._happened = [0.0] * _NUM_BINS
        self._num_tokens = 0.0

    def note(
        self, probabilities: Sequence[float], num_accepted: int, num_requests: int = 1
    ) -> None:
        """Requests whose drafts had the same chances and the same fate.

        Args:
            probabilities: Of acceptance of each token that the target verified, given
                that those before it were accepted.
            num_accepted: The first so many were accepted.
            num_requests: Requests.
        """
        for position, probability in enumerate(probabilities):
            index = min(int(probability * _NUM_BINS), _NUM_BINS - 1)
            self._expected[index] += num_requests * probability
            if position < num_accepted:
                self._happened[index] += num_requests
        self._num_tokens += num_requests * len(probabilities)
        if self._num_tokens > _MAX_TOKENS:
            self._expected = [0.5 * value for value in self._expected]
            self._happened = [0.5 * value for value in self._happened]
            self._num_tokens *= 0.5

    @property
    def error(self) -> float | None:
        """Mean difference between chance and frequency, 0 to 1; None at first."""
        if not self._num_tokens:
            return None
        pairs = zip(self._expected, self._happened, strict=True)
        return sum(abs(chance - fact) for chance, fact in pairs) / self._num_tokens
