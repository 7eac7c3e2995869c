"""vLLM's Ray executor on a CPU, which vLLM refuses: everything but the GPUs is real.

Workers are Ray actors, the config reaches them by Ray's serialization, and messages go
through the queues that they have on GPUs. Replaced is what asks Ray for GPUs.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import ray
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.executor import ray_executor_v2

from tests.support.ray_messages import look_at

SEEN_FILE = "RAY_LIFE_SEEN_FILE"
"""Variable: where a worker writes down what has arrived."""


class CPURayWorker(ray_executor_v2.RayWorkerProc):
    """A worker for which Ray has set aside a core."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        # As it has arrived; vLLM loads plugins when it initializes the worker.
        seen = json.dumps(look_at(vllm_config))
        Path(os.environ[SEEN_FILE]).write_text(seen)
        super().__init__(vllm_config, *args, **kwargs)

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        return ray.get_runtime_context().get_node_id(), [0]


class CPURayExecutor(ray_executor_v2.RayExecutorV2):
    """An executor that asks for cores."""

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        return {}


@contextmanager
def cores_for_gpus() -> Iterator[type[CPURayExecutor]]:
    """Within: what goes into ``distributed_executor_backend``."""
    with (
        mock.patch.object(type(current_platform), "ray_device_key", "CPU"),
        mock.patch.object(ray_executor_v2, "RayWorkerProc", CPURayWorker),
    ):
        yield CPURayExecutor
