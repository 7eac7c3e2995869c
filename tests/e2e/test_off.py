"""While drafting is off the MTP layers rest; when it resumes nothing was missed.

The same script of draft depths runs twice: with MTP layers that rest and catch up, and
with MTP layers that see every token at once, as vLLM's do. Every draft of every step
must be accepted as far in the one as in the other, so the KV that the catch-up writes
is that which would have been there.
"""

from typing import Any

import pytest

from tests.support.engine_jobs import JobResult, Jobs, run_jobs
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts

SPECULATION = {"method": "mtp_plus", "num_speculative_tokens": 3}
ENGINE: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 192}
SCRIPT = [0] * 9 + [2] * 2 + [0] * 2 + [3] + [0] * 5 + [1] * 4
"""Long and short pauses, in and out of step with requests that come and go."""


def run_twice(**settings: Any) -> tuple[JobResult, JobResult, JobResult]:
    """No speculation; MTP layers that rest; MTP layers that never do."""
    is_async = {"async_scheduling": True} if settings.pop("is_async", False) else {}
    ours = ENGINE | is_async | {"speculative_config": SPECULATION}
    common = {
        "model": str(BUNDLED_CHECKPOINT),
        "prompts": [list(p) for p in heldout_prompts(7, max_tokens=48)],
        **settings,
    }
    (plain,) = run_jobs(Jobs(engines=[ENGINE], **common))
    resting, never = run_jobs(
        Jobs(engines=[ours, ours | {"never_rest": True}], script=SCRIPT, **common)
    )
    return plain, resting, never


CASES = {
    "v1": {"max_tokens": 70},
    "v1-async": {"max_tokens": 70, "is_async": True},
    "v2": {"max_tokens": 40, "v2": True},
    "v2-async": {"max_tokens": 40, "v2": True, "is_async": True},
}


@pytest.mark.parametrize("case", CASES)
def test_after_a_pause_drafts_are_accepted_as_if_there_had_been_none(case: str) -> None:
    plain, resting, never = run_twice(**CASES[case])
    assert resting.continuations == never.continuations == plain.continuations
    assert resting.num_catch_up_tokens > 100
    assert never.num_catch_up_tokens == 0
    assert resting.accepted == never.accepted
    accepted = [a for step in resting.accepted for _, _, a in step]
    assert len(accepted) > 40
    assert sum(accepted) > 0
