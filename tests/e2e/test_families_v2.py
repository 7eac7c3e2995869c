"""Families with a drafter of their own, or a mended one, on Model Runner V2."""

from pathlib import Path

import pytest

from tests.support.engine_jobs import Jobs, run_jobs
from tests.support.engines import ENGINE_ARGUMENTS, assistant_option
from tests.support.random_checkpoints import random_prompts, write_checkpoint

DRAFTERS = {
    "step3p5": "MTPPlusMultiModuleSpeculator",
    "gemma4": "MTPPlusGemma4Speculator",
    "openpangu": "MTPPlusSpeculator",
}


@pytest.mark.parametrize("family", DRAFTERS)
def test_v2_equals_no_speculation(family: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, family)
    options = {"method": "mtp_plus", "controller": "random"} | assistant_option(model)
    plain = ENGINE_ARGUMENTS | {"max_num_batched_tokens": 256}
    jobs = Jobs(
        str(model),
        random_prompts(3),
        max_tokens=16,
        engines=[plain, plain | {"speculative_config": options}],
        v2=True,
    )
    expected, drafted = run_jobs(jobs)
    assert drafted.drafter == DRAFTERS[family]
    assert drafted.continuations == expected.continuations
    assert 0 < drafted.counters["accepted_tokens"] < drafted.counters["draft_tokens"]
