"""Scrub mode on a GPU: Model Runner V2, CUDA graphs and eager, async scheduling.

Skipped where there is no GPU; see ``test_scrub.py`` for what is looked at.
"""

import pytest
import torch

from tests.support.engine_jobs import SHARED_GPU, Jobs, run_jobs
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SCRUB = {
    "method": "mtp_plus",
    "num_speculative_tokens": 5,
    "controller": "random",
    "kv_rollback": "scrub",
}


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_rejected_slots_are_zero_and_committed_ones_unchanged(eager: bool) -> None:
    settings = {
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 16 * 2**20,
        "enforce_eager": eager,
        **SHARED_GPU,
    }
    unscrubbed, scrubbed = run_jobs(
        Jobs(
            model=str(BUNDLED_CHECKPOINT),
            prompts=[list(prompt) for prompt in heldout_prompts(16)],
            max_tokens=48,
            engines=[
                settings | {"speculative_config": SCRUB | {"kv_rollback": "metadata"}},
                settings | {"speculative_config": SCRUB},
            ],
            watch_slots=True,
        )
    )
    assert unscrubbed.violations, "the watch must see what is not scrubbed"
    assert scrubbed.violations == []
    assert scrubbed.num_checked_slots > 1000
    assert scrubbed.continuations == unscrubbed.continuations
