"""One device, or several ranks that torchrun or Ray Train has started (FSDP2)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.fsdp import fully_shard

from vllm_mtp.tune.unroll import Drafter


class Ranks:
    """Where a run trains."""

    def __init__(self, device: torch.device) -> None:
        """Of this process; a group of several has been made."""
        self.device = device
        # Ray Train makes a group of a single rank, too.
        self.is_several = distributed.is_initialized() and (
            distributed.get_world_size() > 1
        )
        self.is_first = not self.is_several or distributed.get_rank() == 0

    def shard(self, drafter: Drafter) -> Drafter:
        """Bring a drafter to the device, on several ranks a part of it."""
        if not self.is_several:
            return drafter.to(self.device)
        kind = self.device.type
        mesh = distributed.device_mesh.init_device_mesh(
            kind, (distributed.get_world_size(),)
        )
        drafter = drafter.to(self.device)
        for layer in drafter.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(drafter, mesh=mesh)
        return drafter

    def gather(self, drafter: Drafter) -> dict[str, torch.Tensor]:
        """All weights by their names in the checkpoint, on the first rank's CPU."""
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        found: dict[str, torch.Tensor] = {}
        state = get_model_state_dict(drafter, options=whole)
        for number, layer in enumerate(drafter.layers):
            prefix = f"layers.{number}."
            own = {
                name.removeprefix(prefix): weight
                for name, weight in state.items()
                if name.startswith(prefix)
            }
            if own:  # on the first rank alone
                found |= layer.stored(own)  # type: ignore[operator]
        return found


@contextmanager
def on_ranks(device: str) -> Iterator[Ranks]:
    """Within, the process group that torchrun's variables ask for, if they do.

    A group that is there already (Ray Train's) is used and stays.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``.
    """
    has_gpu = torch.cuda.is_available() and device != "cpu"
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = torch.device("cuda", local_rank) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(chosen)
    is_wanted = int(os.environ.get("WORLD_SIZE", "1")) > 1
    is_ours = is_wanted and not distributed.is_initialized()
    if is_ours:
        distributed.init_process_group("nccl" if has_gpu else "gloo")
    try:
        yield Ranks(chosen)
    finally:
        if is_ours:
            distributed.destroy_process_group()
