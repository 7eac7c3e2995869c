"""Builds vLLM's draft model without memory, in a process that is thrown away.

A model takes a distributed environment, registers its layers in the config and leaves
tensors in caches of vLLM's (those of rotary embeddings): a forked child may do all of
that, and has vLLM imported already. Where a child cannot (it hangs, or the process has
a distributed environment of its own) nothing is known, and what checks the weights
after they are loaded (`worker/loaded_weights.py`) is left.
"""

import copy
import multiprocessing
import os
from collections.abc import Mapping
from multiprocessing.connection import Connection
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
from vllm.logger import init_logger
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from vllm_mtp.integration.load.dry_load import DryLoad, UndecidedError, dry_load
from vllm_mtp.integration.load.weight_health import Header

# Below "vllm", so that its log settings apply to our lines, too.
logger = init_logger("vllm.mtp_plus")

TIMEOUT_S = 120.0


def try_loading(config: VllmConfig, headers: Mapping[str, Header]) -> DryLoad | str:
    """Ask vLLM's draft model which tensors it takes.

    Args:
        config: Finished, with a speculative config.
        headers: Of the draft model's checkpoint.

    Returns:
        Why vLLM could not be asked, where it could not.
    """
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=_answer, args=(sender, config, headers), daemon=True)
    try:
        child.start()
    except (AssertionError, OSError) as error:
        # A daemonic process may have no children.
        return f"no process can be started: {error}"
    sender.close()
    try:
        if not receiver.poll(TIMEOUT_S):
            return f"no answer in {TIMEOUT_S:.0f} s"
        answer: DryLoad | str = receiver.recv()
        return answer
    except EOFError:
        return "the process that should have tried has ended"
    finally:
        child.kill()
        child.join()


def _answer(
    sender: Connection, config: VllmConfig, headers: Mapping[str, Header]
) -> None:
    """In the child. Its log would be the engine's, said twice."""
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    torch.set_num_threads(1)
    try:
        answer = _try_loading(config, headers)
    except Exception as error:
        sender.send(f"{type(error).__name__}: {error}"[:500])
    else:
        sender.send(answer)


def _try_loading(config: VllmConfig, headers: Mapping[str, Header]) -> DryLoad:
    if torch.distributed.is_initialized():
        raise UndecidedError("the process is part of a distributed environment")
    config = copy.copy(config)
    # All of the model in one place, whoever shares it later.
    config.parallel_config = ParallelConfig()
    speculative = config.speculative_config
    assert speculative is not None
    draft = speculative.draft_model_config
    with TemporaryDirectory() as folder, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel()
        with (
            set_default_torch_dtype(draft.dtype),
            _OnMeta(),
            set_model_tag("eagle_head"),
        ):
            model = initialize_model(vllm_config=config, model_config=draft)
    num_layers = config.model_config.get_total_num_hidden_layers()
    return dry_load(model, headers, num_layers)


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
