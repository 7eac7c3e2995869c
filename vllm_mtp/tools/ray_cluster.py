"""A Ray cluster to work on: the one that is there, or one of this machine alone.

Nothing here is imported unless an option asks for Ray, which is an extra.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from vllm_mtp.config import ConfigError

OBJECT_STORE_BYTES = 200 * 2**20
"""Of a cluster of our own: orders and counts travel through it, no tensors. Ray's
default is 30 % of the machine's memory."""
_OF_OUR_CLUSTER = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's workers yield to everybody (15); engines here are what is waited for.
    "RAY_worker_niceness": "0",
}


def require_ray() -> None:
    """Check that the extra is installed.

    Raises:
        ConfigError: It is not.
    """
    if find_spec("ray") is None:
        raise ConfigError("ray: it is not installed; pip install 'vllm-mtp[ray]'")


@contextmanager
def connected() -> Iterator[None]:
    """Within: this process is the driver of a Ray cluster.

    A cluster that it is connected to already is used and stays; else the one that
    ``RAY_ADDRESS`` or this machine has; else one of this machine alone is started, and
    ends with the block.

    Raises:
        ConfigError: Ray is not installed, or nobody answers at ``RAY_ADDRESS``.
    """
    require_ray()
    import ray

    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "WARNING"}
    try:
        ray.init(address="auto", **quiet)
    except ConnectionError:
        address = os.environ.get("RAY_ADDRESS")
        if address is not None:
            raise ConfigError(f"ray: no cluster answers at {address}") from None
        for name, value in _OF_OUR_CLUSTER.items():
            os.environ.setdefault(name, value)
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            **quiet,
        )
    try:
        yield
    finally:
        ray.shutdown()


def has_gpus() -> bool:
    """Whether the cluster has any."""
    return _places("GPU") >= 1


def check_room(num_processes: int, what: str, on_gpu: bool) -> None:
    """Check that processes find a place now: Ray would let them wait for ever.

    Args:
        num_processes: Each takes a GPU, or a CPU where none is used.
        what: They are, for the sentence.
        on_gpu: What they take.

    Raises:
        ConfigError: There are too few.
    """
    kind = "GPU" if on_gpu else "CPU"
    room = _places(kind)
    if num_processes > room:
        raise ConfigError(
            f"ray: {num_processes} {what} want a {kind} each; the cluster has {room}"
        )


def _places(kind: str) -> int:
    """Of all machines, taken ones, too."""
    import ray

    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return int(resources.get(kind, 0))
