"""Do two samples come from one distribution? Chi-square over pooled cells."""

from collections import Counter
from collections.abc import Hashable, Iterable

from scipy.stats import chi2_contingency

MIN_EXPECTED_COUNT = 8
"""Rarer cells are pooled: below about 5 the statistic is no chi-square."""


def homogeneity_p_value(first: Iterable[Hashable], second: Iterable[Hashable]) -> float:
    """Probability of a difference this large if both samples share a distribution.

    Args:
        first: outcomes of one engine.
        second: outcomes of the other, independent of the first.
    """
    counts = Counter(first), Counter(second)
    total = counts[0].total() + counts[1].total()
    smaller_share = min(counts[0].total(), counts[1].total()) / total
    cells: dict[Hashable, list[int]] = {}
    for outcome in counts[0].keys() | counts[1].keys():
        pair = [counts[0][outcome], counts[1][outcome]]
        rare = sum(pair) * smaller_share < MIN_EXPECTED_COUNT
        cell = cells.setdefault("rare" if rare else outcome, [0, 0])
        cell[0] += pair[0]
        cell[1] += pair[1]
    assert len(cells) >= 4, f"too few distinct outcomes to compare: {len(cells)}"
    return float(chi2_contingency(list(zip(*cells.values(), strict=True))).pvalue)
