"""Is what a speculating engine answered what the target alone would?

Greedy texts token by token; samples by chi-square over pooled outcomes. Pure.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from scipy.optimize import brentq
from scipy.stats import chi2, chi2_contingency, ncx2

Answer = Mapping[str, Any]
"""``token_ids`` and ``logprobs``, see ``integration/commands/commanded_engine.py``."""


class Difference(NamedTuple):
    """Where a greedy text leaves the target's.

    Attributes:
        prompt: Number of the prompt, from 0.
        position: Of the first token that differs, from 0.
        expected: The target's token.
        found: The other one.
        gap: By how much the target prefers its own, as a difference of logarithms of
            probabilities; None if the other one is not among the likeliest.
    """

    prompt: int
    position: int
    expected: int
    found: int
    gap: float | None

    def is_tie(self, tolerance: float) -> bool:
        """Whether rounding can be the reason."""
        return self.gap is not None and self.gap <= tolerance


class Comparison(NamedTuple):
    """Sampled texts of one setting, compared by their first tokens.

    Attributes:
        setting: Name of the sampling parameters.
        num_tokens: First tokens that were compared, jointly.
        num_outcomes: Distinct ones, all rare ones together.
        p_value: Of the chi-square test of homogeneity.
        finds: Share of outcomes that would have to be wrong to be noticed.
    """

    setting: str
    num_tokens: int
    num_outcomes: int
    p_value: float
    finds: float


def greedy_differences(
    expected: Sequence[Answer], found: Sequence[Answer]
) -> list[Difference]:
    """First difference of each text; what follows it is another text."""
    differences = []
    for prompt, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        pairs = zip(theirs["token_ids"], ours["token_ids"], strict=True)
        for position, (right, wrong) in enumerate(pairs):
            if right != wrong:
                known = dict(theirs["logprobs"][position])
                gap = known[right] - known[wrong] if wrong in known else None
                differences.append(Difference(prompt, position, right, wrong, gap))
                break
    return differences


def compare_samples(
    setting: str,
    expected: Sequence[Answer],
    found: Sequence[Answer],
    max_tokens: int,
    alpha: float,
) -> list[Comparison]:
    """Joint distribution of the first token, of the first two, and so on.

    Where outcomes are so many that nearly all are rare, longer ones say nothing and
    are left out.
    """
    comparisons = []
    for number in range(1, max_tokens + 1):
        pair = [
            [tuple(answer["token_ids"][:number]) for answer in answers]
            for answers in (expected, found)
        ]
        outcomes = num_cells(*pair)
        if outcomes >= MIN_CELLS:
            comparisons.append(
                Comparison(
                    setting,
                    number,
                    outcomes,
                    homogeneity_p_value(*pair),
                    smallest_shift(pair[0], pair[1], alpha),
                )
            )
    return comparisons


MIN_EXPECTED_COUNT = 8
"""Rarer outcomes are pooled: below about 5 the statistic is no chi-square."""

MIN_CELLS = 4
"""Fewer tell next to nothing."""

POWER = 0.9


def homogeneity_p_value(first: Iterable[Hashable], second: Iterable[Hashable]) -> float:
    """Probability of a difference this large if both samples share a distribution."""
    cells = _pooled(first, second)
    assert len(cells) >= MIN_CELLS, f"too few outcomes to compare: {len(cells)}"
    return float(chi2_contingency(list(zip(*cells.values(), strict=True))).pvalue)


def num_cells(first: Iterable[Hashable], second: Iterable[Hashable]) -> int:
    """Distinct outcomes that are not rare, and one for all rare ones."""
    return len(_pooled(first, second))


def smallest_shift(
    first: Sequence[Hashable], second: Sequence[Hashable], alpha: float
) -> float:
    """What the comparison would find nine times in ten.

    Returns:
        Share of all outcomes, in 0..1, that one engine would have to turn from the
        likeliest into the second likeliest.
    """
    cells = _pooled(first, second)
    shares = sorted((sum(pair) for pair in cells.values()), reverse=True)
    likeliest, second_likeliest = (n / (len(first) + len(second)) for n in shares[:2])
    degrees = len(cells) - 1
    limit = chi2.isf(alpha, degrees)
    # Noncentrality at which the statistic exceeds its limit with the wanted power.
    needed = brentq(
        lambda centre: ncx2.sf(limit, degrees, centre) - POWER, 1e-6, 10 * limit + 99
    )
    num_pairs = 1 / (1 / len(first) + 1 / len(second))

    def centre_of(shift: float) -> float:
        """Of the statistic, if the two outcomes' shares differ by ``shift``."""
        between = likeliest - shift / 2, second_likeliest + shift / 2
        return num_pairs * shift**2 * sum(1 / share for share in between)

    if centre_of(likeliest) < needed:
        return 1.0  # not even if it never happened
    return float(brentq(lambda shift: centre_of(shift) - needed, 0.0, likeliest))


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
