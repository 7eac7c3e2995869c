"""An engine begins with what another has learned, and says the same."""

import json
from pathlib import Path

from tests.e2e.small_jobs import small_jobs
from tests.support.engine_jobs import JobResult, run_jobs


def run(folder: Path) -> list[JobResult]:
    """Engines one after the other: without speculation, a cold one, a warm one."""
    speculation = {"method": "mtp_plus", "warm_start_path": str(folder)}
    # Few at a time take more steps, after which both files are written.
    learning = {"speculative_config": speculation, "max_num_seqs": 2}
    return run_jobs(small_jobs([{}, learning, learning], max_tokens=96))


def test_the_second_engine_drafts_more_of_what_is_accepted_and_texts_are_equal(
    tmp_path: Path,
) -> None:
    plain, cold, warm = run(tmp_path / "learned")
    assert cold.continuations == warm.continuations == plain.continuations
    for result in (cold, warm):
        assert result.counters["accepted_tokens"] > 0
    # Fewer passes of the target for the same tokens.
    assert warm.counters["drafts"] < cold.counters["drafts"]
    kinds = {}
    for path in (tmp_path / "learned").iterdir():
        state = json.loads(path.read_text())
        assert state["identity"]["max_draft_length"] == "8"
        kinds[path.stem.rpartition("-")[2]] = state
    assert set(kinds) == {"controller", "vocabulary"}
    assert kinds["controller"]["blocks"]
    assert kinds["vocabulary"]["token_ids"]
