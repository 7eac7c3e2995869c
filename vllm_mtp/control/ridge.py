"""Ridge regression of a handful of features, without numpy."""

from collections.abc import Iterable, Sequence


def ridge(
    samples: Iterable[tuple[Sequence[float], float, float]], penalties: Sequence[float]
) -> list[float]:
    """Coefficients c that minimise ``sum w (y - x.c)^2 + sum penalty_i c_i^2``.

    Args:
        samples: Features x, value y and weight w of each sample.
        penalties: One for each feature, > 0: the inverse variance that a coefficient
            has around 0 before any sample.
    """
    size = len(penalties)
    matrix = [[0.0] * (size + 1) for _ in range(size)]
    for index, penalty in enumerate(penalties):
        matrix[index][index] = penalty
    for features, value, weight in samples:
        row = [*features, value]
        for index, feature in enumerate(features):
            if feature:
                scaled = weight * feature
                matrix[index] = [
                    m + scaled * r for m, r in zip(matrix[index], row, strict=True)
                ]
    return _solve(matrix)


def _solve(matrix: list[list[float]]) -> list[float]:
    """Gauss-Jordan elimination; penalties make every pivot positive."""
    size = len(matrix)
    for column in range(size):
        pivot = matrix[column]
        pivot = [value / pivot[column] for value in pivot]
        matrix[column] = pivot
        for index in range(size):
            factor = matrix[index][column]
            if index != column and factor:
                matrix[index] = [
                    m - factor * p for m, p in zip(matrix[index], pivot, strict=True)
                ]
    return [row[-1] for row in matrix]
