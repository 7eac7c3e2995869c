"""Families with a drafter of their own, or a mended one, on Model Runner V2."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.engine_jobs import Jobs, run_jobs
from tests.support.engines import (
    ENGINE_ARGUMENTS,
    assistant_option,
    backend_option,
)
from tests.support.random_checkpoints import random_prompts, write_checkpoint

DRAFTERS = {
    "step3p5": ("MTPPlusMultiModuleSpeculator", False),
    "gemma4": ("MTPPlusGemma4Speculator", False),
    "openpangu": ("MTPPlusSpeculator", True),
}
"""And whether steps without drafts leave KV to be filled in."""
SCRIPT = [2, 0, 0, 0, 0, 3]


@pytest.mark.parametrize("family", DRAFTERS)
def test_v2_equals_no_speculation(family: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, family)
    backend = backend_option(family)
    options = {"method": "mtp_plus", "num_speculative_tokens": 3}
    options |= backend | assistant_option(model)
    plain = ENGINE_ARGUMENTS | backend | {"max_num_batched_tokens": 256}
    jobs = Jobs(
        str(model),
        random_prompts(3),
        max_tokens=20,
        engines=[plain | {"speculative_config": options}],
        script=SCRIPT,
        v2=True,
    )
    (drafted,) = run_jobs(jobs)
    (expected,) = run_jobs(replace(jobs, engines=[plain], script=[]))
    drafter, backfills = DRAFTERS[family]
    assert drafted.drafter == drafter
    assert (drafted.num_backfill_tokens > 0) == backfills
    assert drafted.continuations == expected.continuations
    assert 0 < drafted.counters["accepted_tokens"] < drafted.counters["draft_tokens"]
