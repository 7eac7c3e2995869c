"""Is what a speculating engine answered what the target alone would? Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm_mtp.tools.homogeneity import (
    MIN_CELLS,
    homogeneity_p_value,
    num_cells,
    smallest_shift,
)

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
