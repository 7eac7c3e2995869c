"""Do two samples come from one distribution? Chi-square over pooled cells."""

from collections import Counter
from collections.abc import Hashable, Iterable

from scipy.stats import chi2_contingency

MIN_EXPECTED_COUNT = 8
"""Rarer cells are pooled: below about 5 the statistic is no chi-square."""


MIN_CELLS = 4


def homogeneity_p_value(first: Iterable[Hashable], second: Iterable[Hashable]) -> float:
    """Probability of a difference this large if both samples share a distribution.

    Args:
        first: outcomes of one engine.
        second: outcomes of the other, independent of the first.
    """
    cells = _pooled(first, second)
    assert len(cells) >= MIN_CELLS, f"too few outcomes to compare: {len(cells)}"
    return float(chi2_contingency(list(zip(*cells.values(), strict=True))).pvalue)


def num_cells(first: Iterable[Hashable], second: Iterable[Hashable]) -> int:
    """Distinct outcomes that are not rare, and one for all rare ones."""
    return len(_pooled(first, second))


def _pooled(
    first: Iterable[Hashable], second: Iterable[Hashable]
) -> dict[Hashable, list[int]]:
    """Counts in both samples of each outcome, rare ones together."""
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
    return cells
