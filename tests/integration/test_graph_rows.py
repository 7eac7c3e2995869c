"""Up to how many rows requests have equally many draft tokens."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.compilation import CUDAGraphMode

from vllm_mtp.integration.scheduler.controllers import allowed_depths, max_graph_rows


def config(mode: CUDAGraphMode, is_v2: bool = True, **compilation: Any) -> Any:
    return SimpleNamespace(
        num_speculative_tokens=8,
        use_v2_model_runner=is_v2,
        parallel_config=SimpleNamespace(data_parallel_size=1),
        compilation_config=SimpleNamespace(
            cudagraph_mode=mode, **{"max_cudagraph_capture_size": 512} | compilation
        ),
    )


@pytest.mark.parametrize(
    ("config", "rows", "has_tiers"),
    [
        (config(CUDAGraphMode.FULL_AND_PIECEWISE), 512, True),
        (config(CUDAGraphMode.FULL_DECODE_ONLY), 512, True),
        # Any step is replayed whole.
        (config(CUDAGraphMode.FULL), 0, True),
        (config(CUDAGraphMode.PIECEWISE), 0, False),
        (config(CUDAGraphMode.NONE), 0, False),
        (config(CUDAGraphMode.FULL_AND_PIECEWISE, is_v2=False), 0, False),
        (
            config(CUDAGraphMode.FULL_DECODE_ONLY, max_cudagraph_capture_size=None),
            0,
            True,
        ),
    ],
)
def test_it_follows_the_graphs_of_decode_steps(
    config: Any, rows: int, has_tiers: bool
) -> None:
    assert max_graph_rows(config) == rows
    assert (allowed_depths(config) is not None) == has_tiers
