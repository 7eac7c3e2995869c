"""Workers of Ray on GPUs: greedy output is the target's. Model Runner V2, CUDA graphs.

Skipped where there are too few GPUs; ``configs/gpu/run ray`` runs it. What can be tried
without a GPU is in ``test_ray.py``.
"""

import pytest
import torch

from tests.support.engine_jobs import SHARED_GPU, Jobs, run_jobs
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts

pytestmark = pytest.mark.gpu

RANDOM = {"method": "mtp_plus", "num_speculative_tokens": 5, "controller": "random"}


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_every_token_equals_with_workers_in_ray_actors(num_gpus: int) -> None:
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} CUDA devices")
    settings = {"max_num_seqs": 16} | SHARED_GPU
    by_ray = settings | {
        "distributed_executor_backend": "ray",
        "tensor_parallel_size": num_gpus,
    }
    plain, drafted, randomized = run_jobs(
        Jobs(
            model=str(BUNDLED_CHECKPOINT),
            prompts=[list(prompt) for prompt in heldout_prompts(32)],
            max_tokens=96,
            engines=[
                settings,
                by_ray | {"speculative_config": {"method": "mtp_plus"}},
                by_ray | {"speculative_config": RANDOM},
            ],
        )
    )
    for result in (drafted, randomized):
        assert result.scheduler == "MTPPlusAsyncScheduler"
        assert 0 < result.counters["accepted_tokens"] < result.counters["draft_tokens"]
        assert result.continuations == plain.continuations
