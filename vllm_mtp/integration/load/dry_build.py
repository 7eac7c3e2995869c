"""Builds vLLM's draft model without memory, in a process that is thrown away.

A model takes a distributed environment, registers its layers in the config and leaves
tensors in caches of vLLM's (those of rotary embeddings): a forked child may do all of
that, and has vLLM imported already. Where a child cannot (it hangs, or the process has
a distributed environment of its own) nothing is known, and what checks the weights
after they are loaded (`worker/loaded_weights.py`) is left.
"""

import copy
import logging
import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

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

from vllm_mtp.integration.load.dry_load import DryLoad, UndecidedError, dry_load
from vllm_mtp.integration.load.weight_health import Header

TIMEOUT_S = 120.0

Answer = TypeVar("Answer")


def try_loading(config: VllmConfig, headers: Mapping[str, Header]) -> DryLoad | str:
    """Ask vLLM's draft model which tensors it takes.

    Args:
        config: Finished, with a speculative config.
        headers: Of the draft model's checkpoint.

    Returns:
        Why vLLM could not be asked, where it could not.
    """
    num_layers = config.model_config.get_total_num_hidden_layers()
    return in_child(lambda: dry_load(draft_model_on_meta(config), headers, num_layers))


def in_child(ask: Callable[[], Answer]) -> Answer | str:
    """Answer something in a forked child.

    Returns:
        Why there is no answer, where there is none.
    """
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=_send_answer, args=(sender, ask), daemon=True)
    try:
        child.start()
    except (AssertionError, OSError) as error:
        # A daemonic process may have no children.
        return f"no process can be started: {error}"
    sender.close()
    try:
        if not receiver.poll(TIMEOUT_S):
            return f"no answer in {TIMEOUT_S:.0f} s"
        answer: Answer | str = receiver.recv()
        return answer
    except EOFError:
        return "the process that should have answered has ended"
    finally:
        child.kill()
        child.join()


def _send_answer(sender: Connection, ask: Callable[[], Any]) -> None:
    # What vLLM logs here the engine logs, too.
    logging.disable()
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    torch.set_num_threads(1)  # threads do not survive a fork
    try:
        answer = ask()
    except Exception as error:
        answer = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    sender.send(answer)


def draft_model_on_meta(config: VllmConfig) -> Any:
    """Build vLLM's draft model, all of it in one place, whoever shares it later.

    To be called in a process that is thrown away.

    Raises:
        UndecidedError: The process has a distributed environment already.
    """
    if torch.distributed.is_initialized():
        raise UndecidedError("the process is part of a distributed environment")
    config = copy.copy(config)
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
            return initialize_model(vllm_config=config, model_config=draft)


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
