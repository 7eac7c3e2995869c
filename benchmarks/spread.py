"""A figure over several repeats: median and quartiles."""

import random
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

RESAMPLES = 10_000


class Spread(NamedTuple):
    """A figure over the repeats."""

    median: float
    lower: float
    """First quartile."""
    upper: float
    """Third quartile."""
    each: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarise at least one value."""
        lower, median, upper = (
            statistics.quantiles(values, n=4, method="inclusive")
            if len(values) > 1
            else (values[0],) * 3
        )
        return cls(median, lower, upper, tuple(values))

    @classmethod
    def of_ratio(cls, over: "Spread", under: "Spread") -> "Spread":
        """Quotient of two figures, paired within each repeat."""
        return cls.of([a / b for a, b in zip(over.each, under.each, strict=True)])

    @classmethod
    def of_geometric_mean(cls, *figures: "Spread") -> "Spread":
        """Of several that are the same but for chance, paired within each repeat."""
        repeats = zip(*(figure.each for figure in figures), strict=True)
        return cls.of([statistics.geometric_mean(each) for each in repeats])

    def as_json(self) -> dict[str, Any]:
        """For the result file."""
        return {
            "median": self.median,
            "quartiles": [self.lower, self.upper],
            "each": list(self.each),
        }


def resampled_interval(ratios: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the geometric mean of ratios, by the bootstrap."""
    draw = random.Random(0)
    means = sorted(
        statistics.geometric_mean(draw.choices(ratios, k=len(ratios)))
        for _ in range(RESAMPLES)
    )
    return means[RESAMPLES // 40], means[-RESAMPLES // 40 - 1]
