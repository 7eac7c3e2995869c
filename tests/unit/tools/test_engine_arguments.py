"""Arguments of the engines that commands start."""

from typing import Any

import pytest

from vllm_mtp.tools.engine_arguments import EngineSize, engine_arguments


def arguments(on_gpu: bool) -> dict[str, Any]:
    return engine_arguments(EngineSize("model", 256, 8, kv_cache_mib=64), None, on_gpu)


def test_engines_side_by_side_leave_room_for_each_other_on_a_gpu() -> None:
    assert arguments(on_gpu=True)["gpu_memory_utilization"] <= 0.05
    assert "gpu_memory_utilization" not in arguments(on_gpu=False)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_graphs_are_captured_on_a_gpu_alone(on_gpu: bool) -> None:
    assert arguments(on_gpu)["enforce_eager"] is not on_gpu
    assert arguments(on_gpu)["kv_cache_memory_bytes"] == 64 * 2**20
