"""The step times of one bucket of batches: cells that were visited, and the others.

A *cell* is a pair (tier, depth). Tiers number the rows that are verified::

    tier 4 k        every request verifies k draft tokens (one CUDA graph, if captured)
    tier 2 h + 1    draft lengths differ; h / 2 draft tokens per request, rounded

So a tier over 4 is its draft tokens per request, nearby tiers have nearby numbers,
and mixed batches never share a cell with uniform ones.
"""

import math
from typing import NamedTuple

from vllm_mtp.control.ridge import ridge

Place = tuple[int, int]
"""Cell of a block: tier and draft depth."""

FIRST_VISITS = 5
"""A cell is the median of this many visits before it becomes a running mean."""

_PENALTIES = (1.0, 40.0, 40.0, 400.0)
"""Inverse variances of the plane's constant, its slopes in draft tokens and in depth,
and the step from uniform to mixed batches, all in times of a step."""


class Estimate(NamedTuple):
    """Expected time of a step."""

    seconds: float
    deviation: float
    """Standard deviation of the expectation, as a fraction of it."""


class Shape(NamedTuple):
    """Times relative to each other, before a block has its own."""

    seconds: dict[Place, float]
    deviation: float
    """How far a block may lie from it, as a fraction."""


def uniform_tier(draft_length: int) -> int:
    """Tier of a batch in which every request has ``draft_length`` draft tokens."""
    return 4 * draft_length


def mixed_tier(num_draft_tokens: float) -> int:
    """Tier of a batch of different draft lengths, from their mean."""
    return 2 * round(2 * num_draft_tokens) + 1


def draft_tokens_of(tier: int) -> float:
    """Draft tokens per request at the centre of a tier."""
    return (tier // 2) / 2


def all_places(max_draft_length: int) -> list[Place]:
    """Every cell that a decision can aim at."""
    places = []
    for depth in range(max_draft_length + 1):
        places.append((uniform_tier(depth), depth))
        places += [(2 * halves + 1, depth) for halves in range(2 * depth + 1)]
        if depth:
            # A probe from K = 0 and back: drafts first, verifies a step later.
            places += [(uniform_tier(0), depth), (uniform_tier(depth), 0)]
    return places


class Cell:
    """Time of one kind of step."""

    __slots__ = ("draft_tokens", "first", "seconds", "weight", "when")

    def __init__(self) -> None:
        self.draft_tokens = 0.0
        """Per request, mean of the visits: seldom the centre of the tier."""
        self.first: list[float] = []
        """The first visits, seconds."""
        self.seconds = 0.0
        self.weight = 0.0
        """Visits that are not forgotten."""
        self.when = 0
        """Step of the last visit."""

    def add_first(self, seconds: float, draft_tokens: float) -> None:
        """One of the visits whose median is taken."""
        self.first.append(seconds)
        ordered = sorted(self.first)
        # The lower median: of two visits one may have been disturbed, never sped up.
        self.seconds = ordered[(len(ordered) - 1) // 2]
        self.weight = float(len(ordered))
        self.draft_tokens += (draft_tokens - self.draft_tokens) / self.weight


class Block:
    """The cells of one bucket of batches."""

    def __init__(self, num_requests: int, shape: Shape) -> None:
        """Start from a shape; it is scaled by the first visits.

        Args:
            num_requests: Size of the batch that its times are normalised to.
            shape: Of the nearest block, or of the prior.
        """
        self.num_requests = num_requests
        self.shape = shape
        self.cells: dict[Place, Cell] = {}
        self.slope = 0.5
        """Growth of the time with the number of requests, 0 (none) .. 1."""

    def factor(self, num_requests: int) -> float:
        """Time of a batch over that of the block's own size."""
        return 1.0 + self.slope * (num_requests / self.num_requests - 1.0)

    def estimates(self, places: list[Place], noise: float) -> dict[Place, Estimate]:
        """Expected times of a batch of the block's own size.

        Args:
            places: Cells, visited or not.
            noise: Standard deviation of one step's time, as a fraction.
        """
        if not self.cells:
            deviation = self.shape.deviation
            return {p: Estimate(self._shape_of(p), deviation) for p in places}
        level = self._level()
        plane = self._fit(level, noise)
        leftovers = [
            (
                place,
                cell.seconds / level - self._on_plane(place, cell.draft_tokens, plane),
            )
            for place, cell in self.cells.items()
        ]
        return {
            place: self._combine(place, level, plane, leftovers, noise)
            for place in places
        }

    def _shape_of(self, place: Place) -> float:
        found = self.shape.seconds.get(place)
        if found is not None:
            return found
        # Off the decisions' grid, for the steps between two of them: rows of one
        # decision, depth of the next.
        tier, depth = place
        known = self.shape.seconds
        length = round(draft_tokens_of(tier))
        at_tier = known.get((uniform_tier(length), length))
        at_depth = known.get((uniform_tier(depth), depth))
        if at_tier is None or at_depth is None:
            return next(iter(known.values()))
        return (at_tier + at_depth) / 2

    def _level(self) -> float:
        """Seconds that a relative time of 1 stands for."""
        seconds = sum(c.weight * c.seconds for c in self.cells.values())
        shape = sum(c.weight * self._shape_of(p) for p, c in self.cells.items())
        return seconds / shape

    def _on_plane(
        self, place: Place, draft_tokens: float, plane: list[float]
    ) -> float:
        tier, depth = place
        constant, per_token, per_depth, mixed = plane
        return (
            self._shape_of(place)
            + constant
            + per_token * draft_tokens
            + per_depth * depth
            + mixed * (tier & 1)
        )

    def _fit(self, level: float, noise: float) -> list[float]:
        samples = []
        for place, cell in self.cells.items():
            tier, depth = place
            features = (1.0, cell.draft_tokens, float(depth), float(tier & 1))
            value = cell.seconds / level - self._shape_of(place)
            # 0.03: what a plane cannot describe, however often a cell is visited.
            variance = noise * noise / max(cell.weight, 0.1) + 0.03**2
            samples.append((features, value, 1.0 / variance))
        return ridge(samples, _PENALTIES)

    def _combine(
        self,
        place: Place,
        level: float,
        plane: list[float],
        leftovers: list[tuple[Place, float]],
        noise: float,
    ) -> Estimate:
        tier, depth = place
        own_leftover = pulled = 0.0
        weights, nearest = 0.3, math.inf
        for (other_tier, other_depth), leftover in leftovers:
            distance = abs(tier - other_tier) / 4 + abs(depth - other_depth)
            nearest = min(nearest, distance)
            weight = math.exp(-3.0 * distance)
            if distance == 0:
                own_leftover = leftover
            else:
                pulled += weight * leftover
                weights += weight
        centre = self._on_plane(place, draft_tokens_of(tier), plane)
        guess = max(centre + pulled / weights, 0.05)
        doubt = self.shape.deviation * min(0.1 + 0.6 * nearest, 1.0)
        cell = self.cells.get(place)
        if cell is None:
            return Estimate(level * guess, doubt)
        own = noise * noise / max(cell.weight, 1e-6)
        # Neighbours inform a cell that has hardly been visited, as to its leftover.
        doubt = self.shape.deviation * 0.25
        share = doubt * doubt / (doubt * doubt + own)
        known = max(centre + own_leftover, 0.05)
        relative = share * known + (1 - share) * guess
        return Estimate(level * relative, math.sqrt(share * own))
