"""Greedy output is the target's on a GPU: Model Runner V2, CUDA graphs, async.

Skipped where there is no GPU. On a GPU machine it is part of `make test`; alone:
``python -m pytest tests -m gpu``.
"""

import pytest
import torch

from tests.support.engine_jobs import SHARED_GPU, Jobs, run_jobs
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FIXED = {"method": "mtp_plus", "controller": "fixed"}
RANDOM = {"method": "mtp_plus", "num_speculative_tokens": 5, "controller": "random"}


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_every_token_equals(eager: bool) -> None:
    settings = {"max_num_seqs": 16, "enforce_eager": eager} | SHARED_GPU
    plain, fixed, randomized = run_jobs(
        Jobs(
            model=str(BUNDLED_CHECKPOINT),
            prompts=[list(prompt) for prompt in heldout_prompts(32)],
            max_tokens=96,
            engines=[
                settings,
                settings | {"speculative_config": FIXED},
                settings | {"speculative_config": RANDOM},
            ],
        )
    )
    for result in (fixed, randomized):
        assert result.scheduler == "MTPPlusAsyncScheduler"
        assert result.drafter == "MTPPlusSpeculator"
        assert 0 < result.counters["accepted_tokens"] < result.counters["draft_tokens"]
        assert result.continuations == plain.continuations
