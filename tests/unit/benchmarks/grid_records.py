"""A made-up grid measurement, as engines would have answered."""

from pathlib import Path
from typing import Any

from benchmarks.grid.cells import Cell
from benchmarks.grid.journal import CALIBRATION, ENGINE, ROUND, WARM_UP, Journal
from benchmarks.grid.options import PLUS, GridOptions

PROVENANCE = {
    "git": {"commit": "abc", "is_dirty": False},
    "hardware": {"cpu": "Test", "num_cores": 2, "gpus": []},
}


def tiny_options(folder: Path, **changes: Any) -> GridOptions:
    """Two static K, two cells."""
    arguments: dict[str, Any] = {
        "workloads": ("code", "constrained"),
        "concurrencies": (1,),
        "temperatures": (0.0,),
        "contexts": ("short",),
        "draft_lengths": (1, 2),
        "num_repeats": 2,
        "max_repeats": 2,
        "output": folder,
    }
    return GridOptions(**(arguments | changes))


def figures(
    seconds: float, *, drafted: list[int], accepted: list[int], text: str = "same"
) -> dict[str, Any]:
    """Answer of an engine that made 100 decode tokens in 50 steps."""
    return {
        "seconds": seconds + 1.0,
        "num_tokens": 110,
        "num_steps": 52,
        "decode_seconds": seconds,
        "decode_tokens": 100,
        "decode_steps": 50,
        "decode_request_steps": 50,
        "request_steps": 60,
        "full_seconds": seconds,
        "full_tokens": 100,
        "full_steps": 50,
        "num_drafts": 50,
        "drafted_per_position": drafted,
        "accepted_per_position": accepted,
        "num_preempted": 0,
        "texts_sha256": text,
        "decode_split_seconds": None,
        "peak_rss_bytes": 1,
    }


SECONDS = {
    "code c=1 T=0 short": {
        "none": (4.0, 5.0),
        "none again": (4.0, 4.8),
        "mtp K=1": (2.5, 2.5),
        "mtp K=2": (2.0, 2.0),
        "mtp_plus": (2.0, 2.5),
    },
    "constrained c=1 T=0 short": {
        "none": (4.0, 4.0),
        "none again": (4.2, 4.2),
        "mtp K=1": (5.0, 5.0),
        "mtp K=2": (8.0, 8.0),
        "mtp_plus": (4.0, 5.0),
    },
}
"""Decode seconds of each contender in both repeats."""


def write_journal(journal: Journal, options: GridOptions) -> None:
    """Fill a journal with all rounds of ``SECONDS``."""
    journal.begin(options.as_json(), PROVENANCE)
    for name in ("none", "none again", "mtp K=1", "mtp K=2", "mtp_plus"):
        journal.add(
            ENGINE, contender=name, has_mended_sampling=True, peak_rss_bytes=2**30
        )
    for workload, (cell, contenders) in zip(
        options.workloads, SECONDS.items(), strict=True
    ):
        journal.add(
            CALIBRATION,
            cell=cell,
            axes=vars(Cell(workload, 1, 0.0, "short")),
            request_tokens=48,
            num_requests=2,
            prompt_tokens=65,
        )
        for name, seconds in contenders.items():
            _write_contender(journal, cell, name, seconds)


def _write_contender(
    journal: Journal, cell: str, name: str, seconds: tuple[float, ...]
) -> None:
    drafted = [] if name.startswith("none") else [40, 20]
    accepted = [] if name.startswith("none") else [30, 5]
    warm_up = figures(1.0, drafted=drafted, accepted=accepted)
    split = {"verify": 0.6, "draft": 0.2}
    # Only ours counts for metrics.
    warm_up["decode_split_seconds"] = split | (
        {"metrics": 0.002} if name == PLUS else {}
    )
    journal.add(WARM_UP, cell=cell, contender=name, **warm_up)
    for repeat, each in enumerate(seconds):
        journal.add(
            ROUND,
            cell=cell,
            repeat=repeat,
            contender=name,
            **figures(each, drafted=drafted, accepted=accepted),
        )
