"""An engine begins with what another has learned, and says the same."""

import json
from pathlib import Path
from typing import Any

from tests.e2e.small_jobs import small_jobs
from tests.support.engine_jobs import JobResult, run_jobs

MARK = {"size": 4000, "is_greedy": True, "constrained": [], "margin": 1.5}
"""Of batches that no engine here has: only the file can tell an engine of it."""


def run(folder: Path, *others: dict[str, Any]) -> list[JobResult]:
    """Engines one after the other, the last of which keeps what it learns."""
    speculation = {"method": "mtp_plus", "warm_start_path": str(folder)}
    # Few at a time take more steps, after which both files are written.
    learning = {"speculative_config": speculation, "max_num_seqs": 2}
    return run_jobs(small_jobs([*others, learning], max_tokens=96))


def states(folder: Path) -> dict[str, Path]:
    """Files by what is in them."""
    return {path.stem.rpartition("-")[2]: path for path in folder.iterdir()}


def test_the_second_engine_begins_with_what_the_first_has_learned(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "learned"
    plain, cold = run(folder, {})
    paths = states(folder)
    assert set(paths) == {"controller", "vocabulary"}
    controller = json.loads(paths["controller"].read_text())
    vocabulary = json.loads(paths["vocabulary"].read_text())
    assert controller["identity"]["max_draft_length"] == "8"
    assert controller["blocks"]
    assert vocabulary["token_ids"]
    assert MARK not in controller["margins"]
    controller["margins"].append(MARK)
    paths["controller"].write_text(json.dumps(controller))

    (warm,) = run(folder)
    assert MARK in json.loads(paths["controller"].read_text())["margins"]
    assert cold.continuations == warm.continuations == plain.continuations
    for result in (cold, warm):
        assert result.counters["accepted_tokens"] > 0
