"""Expected times of the steps of one batch, whatever is drafted and verified."""

from collections.abc import Sequence

from benchmarks.control.previous.step_times import Estimate, Layout, StepTimes


class ExpectedTimes:
    """Expected step times of one batch, as of now."""

    def __init__(
        self,
        layout: Layout,
        times: StepTimes,
        scale_s: float,
        guesses_plain: bool = False,
    ) -> None:
        self.guesses_plain = guesses_plain
        """What steps without drafts take is a guess, after many steps with them."""
        self._layout, self._times, self._scale_s = layout, times, scale_s
        self._cache: dict[tuple[float, int, bool], Estimate] = {}

    def uniform(self, draft_length: int, depth: int) -> Estimate:
        """Of a step that verifies ``draft_length`` tokens of every request."""
        key = (draft_length, depth, True)
        if key not in self._cache:
            self._cache[key] = self._of(self._layout.uniform(draft_length, depth))
        return self._cache[key]

    def mixed(self, draft_tokens: float, depth: int) -> Estimate:
        """Of a step that verifies so many tokens per request in the mean."""
        key = (draft_tokens, depth, False)
        if key not in self._cache:
            self._cache[key] = self._of(self._layout.mixed(draft_tokens, depth))
        return self._cache[key]

    def undrafted(self, draft_tokens: float, is_uniform: bool) -> Estimate:
        """Of a step that verifies so many tokens per request and drafts none.

        Args:
            draft_tokens: The mean over the requests.
            is_uniform: All have equally many.
        """
        layout = self._layout
        if is_uniform:
            features = layout.uniform(round(draft_tokens), 0)
        else:
            features = layout.mixed(draft_tokens, 0)
        return self._of(layout.undrafted(features))

    def mixed_curve(self, depth: int) -> list[float]:
        """Expected seconds at 0, 1/2, 1, ... draft tokens per request."""
        tiers = self._times.mixed_tiers(self._layout, depth)
        return [self._scale_s * relative for relative in tiers]

    def _of(self, features: Sequence[float]) -> Estimate:
        relative, deviation = self._times.relative(features)
        return Estimate(relative * self._scale_s, deviation)
