"""Has acceptance become worse? Two evaluations of the same prompts, for a CI job.

Compared are the conditional acceptance of each position and the acceptance length, of
all prompts together. Drafts of one prompt are alike, so uncertainty comes from prompts,
not from drafts: prompts are drawn with replacement, the same ones of both evaluations
(paired), again and again, which gives an interval for each difference.

A figure has become worse if its whole interval lies below zero. All intervals together
raise a false alarm for two equal runs at most with `CompareOptions.false_alarm_rate`
(it is divided among the figures). Independent of that a floor can be crossed: a fall
that is large enough not to be let through however uncertain it is.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_mtp.config import ConfigError
from vllm_mtp.tools.eval_file import EvalFile
from vllm_mtp.tools.option_checks import refuse

MIN_TESTED = 200
"""Positions that were tested less often say nothing and are left out."""
NUM_DRAWS = 10_000
LENGTH = "acceptance length"

Counts = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CompareOptions:
    """What counts as worse.

    Attributes:
        false_alarm_rate: Of all figures together, between equal runs.
        length_floor: Least acceptance length, as a share of the base's.
        position_floor: Least acceptance of each position, likewise.
    """

    false_alarm_rate: float = 0.005
    length_floor: float = 0.95
    position_floor: float = 0.95

    def __post_init__(self) -> None:
        """Check every option.

        Raises:
            ConfigError: One of them has a value that is not allowed.
        """
        if not 1e-6 <= self.false_alarm_rate <= 0.2:
            refuse("false-alarm-rate", self.false_alarm_rate, "from 1e-06 to 0.2")
        for name in ("length_floor", "position_floor"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                refuse(name.replace("_", "-"), value, "a number from 0 to 1")


class Figure(NamedTuple):
    """One figure of both evaluations."""

    name: str
    base: float
    new: float
    interval: tuple[float, float]
    """Of ``new - base``."""
    floor: float
    """Least allowed value of ``new``."""

    @property
    def is_worse(self) -> bool:
        """Surely lower than the base."""
        return self.interval[1] < 0

    @property
    def is_below_floor(self) -> bool:
        """Lower than is let through."""
        return self.new < self.floor

    @property
    def is_failure(self) -> bool:
        """Either."""
        return self.is_worse or self.is_below_floor


class Comparison(NamedTuple):
    """All figures."""

    figures: list[Figure]
    num_prompts: int
    options: CompareOptions

    @property
    def is_failure(self) -> bool:
        """Whether a figure fails."""
        return any(figure.is_failure for figure in self.figures)

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return {
            "is_failure": self.is_failure,
            "num_prompts": self.num_prompts,
            "false_alarm_rate": self.options.false_alarm_rate,
            "figures": [
                each._asdict()
                | {"is_worse": each.is_worse, "is_below_floor": each.is_below_floor}
                for each in self.figures
            ],
        }


def compare(
    base: EvalFile, new: EvalFile, options: CompareOptions, seed: int = 0
) -> Comparison:
    """Compare two evaluations.

    Raises:
        ConfigError: They are not of the same model, prompts and settings.
    """
    _check_comparable(base, new)
    num_positions = min(base.num_positions, new.num_positions)
    pair = [_counts(each, num_positions) for each in (base, new)]
    num_prompts = len(base.records)
    draws = _draws(num_prompts, seed)
    drawn = [_figures_of(draws @ counts, num_positions) for counts in pair]
    seen = [_figures_of(counts.sum(axis=0)[None], num_positions)[0] for counts in pair]
    tested = np.minimum(*(counts.sum(axis=0)[:num_positions] for counts in pair))
    kept = [0, *(1 + np.flatnonzero(tested >= MIN_TESTED))]
    alpha = options.false_alarm_rate / len(kept)
    # A resample of n prompts spreads less than n prompts do.
    widening = np.sqrt(num_prompts / max(num_prompts - 1, 1))
    figures = []
    for index in kept:
        difference = seen[1][index] - seen[0][index]
        around = (drawn[1] - drawn[0])[:, index] - difference
        low, high = difference + widening * np.quantile(around, [alpha, 1 - alpha])
        share = options.position_floor if index else options.length_floor
        name = f"position {index}" if index else LENGTH
        figures.append(
            Figure(
                name,
                float(seen[0][index]),
                float(seen[1][index]),
                (float(low), float(high)),
                float(share * seen[0][index]),
            )
        )
    return Comparison(figures, num_prompts, options)


def _check_comparable(base: EvalFile, new: EvalFile) -> None:
    for field in (
        "model",
        "prompts_sha256",
        "draft_length",
        "temperature",
        "max_tokens",
    ):
        values = getattr(base, field), getattr(new, field)
        if values[0] != values[1]:
            raise ConfigError(
                f"{field}: {values[0]!r} of the base and {values[1]!r} of the new "
                "evaluation differ; evaluate both alike to compare them"
            )
    ids = [[record.id for record in each.records] for each in (base, new)]
    if ids[0] != ids[1]:
        raise ConfigError(
            f"records: {len(ids[0])} prompts of the base and {len(ids[1])} of the new "
            "evaluation are not the same ones; let both run to their end"
        )


@lru_cache(maxsize=1)
def _draws(num_prompts: int, seed: int) -> Counts:
    """``[NUM_DRAWS, num_prompts]``: how often each prompt is drawn.

    Of the same number they are the same in each comparison and take most of its time.
    """
    rng = np.random.default_rng(seed)
    shares = [1 / num_prompts] * num_prompts
    return rng.multinomial(num_prompts, shares, NUM_DRAWS).astype(np.float64)


def _counts(file: EvalFile, num_positions: int) -> Counts:
    """``[num_prompts, 2 * num_positions + 2]``: tested, accepted, drafts, kept."""
    rows = []
    for record in file.records:
        missing = (0,) * num_positions
        tested = (*record.tested, *missing)[:num_positions]
        accepted = (*record.accepted, *missing)[:num_positions]
        rows.append([*tested, *accepted, record.num_drafts, sum(record.accepted)])
    return np.array(rows, dtype=np.float64)


def _figures_of(sums: Counts, num_positions: int) -> Counts:
    """``[num_draws, 1 + num_positions]``: acceptance length, then each position."""
    tested, accepted = sums[:, :num_positions], sums[:, num_positions:-2]
    drafts, kept = sums[:, -2], sums[:, -1]
    lengths = 1.0 + kept / np.maximum(drafts, 1)
    positions = accepted / np.maximum(tested, 1)
    return np.column_stack([lengths, positions])
