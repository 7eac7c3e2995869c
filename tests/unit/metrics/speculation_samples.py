"""Counts as a server might hand them over."""

from vllm_mtp.metrics.stats import (
    COVERAGE,
    DRAFT,
    EXPLORATION,
    PREFILL,
    TARGET,
    UNPROFITABLE,
    VERIFY,
    SpeculationStats,
)


def some() -> SpeculationStats:
    return SpeculationStats(
        draft_lengths=[5, 0, 10, 0],
        drafted=[10, 10, 0],
        accepted=[8, 6, 0],
        without_draft={UNPROFITABLE: 4, EXPLORATION: 1},
        num_rejected_slots=6,
        seconds={TARGET: 0.6, VERIFY: 0.1, DRAFT: 0.3, PREFILL: 2.0},
        num_tokens=29,
        promised_tokens=30.0,
        saved_seconds=0.4,
        levels={COVERAGE: 0.98},
    )
