"""Builds vLLM's draft model without memory, in a process that is thrown away.

A model takes a distributed environment, registers its layers in the config and leaves
tensors in caches of vLLM's (those of rotary embeddings), and to import one may
initialize CUDA: a forked child (`child.py`) may do all of that.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from vllm.compilation.backends import set_model_tag
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.worker.workspace import init_workspace_manager

from vllm_mtp.integration.load.dry_load import UndecidedError


def draft_model_on_meta(config: VllmConfig) -> Any:
    """Build vLLM's draft model, all of it in one place, whoever shares it later.

    To be called in a process that is thrown away.

    Raises:
        UndecidedError: The process has a distributed environment already.
    """
    speculative = config.speculative_config
    assert speculative is not None
    draft = speculative.draft_model_config
    # Sparse attention asks for its workspace when it is built.
    init_workspace_manager(torch.device("meta"))
    with (
        single_rank(config) as config,
        set_default_torch_dtype(draft.dtype),
        _OnMeta(),
        set_model_tag("eagle_head"),
    ):
        return initialize_model(vllm_config=config, model_config=draft)


@contextmanager
def single_rank(config: VllmConfig) -> Iterator[VllmConfig]:
    """Within, a distributed environment of one, and the config for it.

    Raises:
        UndecidedError: The process has a distributed environment already.
    """
    if torch.distributed.is_initialized():
        raise UndecidedError("the process is part of a distributed environment")
    config = copy.copy(config)
    config.parallel_config = parallel = ParallelConfig()
    # vLLM takes those of offline data parallelism from the environment.
    parallel.data_parallel_size = 1
    parallel.data_parallel_rank = parallel.data_parallel_index = 0
    with TemporaryDirectory() as folder, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel()
        yield config


class _OnMeta(TorchFunctionMode):
    """Makes tensors on the meta device, also where an accelerator is asked for."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _device_constructors():
            device = kwargs.get("device")
            if device is None or torch.device(device).type != "cpu":
                kwargs["device"] = "meta"
        return func(*args, **kwargs)
