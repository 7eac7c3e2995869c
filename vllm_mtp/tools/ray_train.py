"""Ranks of a training run on a Ray cluster, started by Ray Train.

Ray Train starts a process for each rank, makes the process group and, when a rank or
its machine is lost, starts all of them again: a run goes on from what it saved last.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

from vllm_mtp.config import ConfigError
from vllm_mtp.tools.ray_cluster import check_room, connected, has_gpus
from vllm_mtp.tools.server_process import ServerError

MAX_RESTARTS = 3
"""Of all ranks, before a run ends; the same command goes on with it."""
_FOLLOW_S = 1.0


def train_on_ray(
    work: Callable[[], None], num_ranks: int, device: str, folder: Path
) -> None:
    """Run a function on each rank.

    Args:
        work: Finds its rank in ``torch.distributed``; it is pickled.
        num_ranks: So many.
        device: ``auto``, ``cpu`` or ``cuda``.
        folder: For what Ray Train itself keeps; all machines see it.

    Raises:
        ConfigError: The cluster is too small, or a rank refused its input.
        ServerError: A rank failed.
    """
    with connected():
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        on_gpu = device != "cpu" and has_gpus()
        check_room(num_ranks, "ranks", on_gpu)
        trainer = TorchTrainer(
            # Ray Train looks at the parameters of what it calls.
            lambda: work(),
            torch_config=TorchConfig(backend="nccl" if on_gpu else "gloo"),
            scaling_config=ScalingConfig(num_workers=num_ranks, use_gpu=on_gpu),
            run_config=RunConfig(
                name="ray",
                storage_path=str(folder),
                failure_config=FailureConfig(max_failures=MAX_RESTARTS),
            ),
        )
        try:
            trainer.fit()
        except Exception as error:
            raise _sentence(error) from error


def _sentence(error: Exception) -> Exception:
    """What the user reads: of the first rank that failed."""
    failures: dict[int, Exception] = getattr(error, "worker_failures", {})
    # Ray's own processes fail, too: a rank that dies while it starts is one of them.
    of_controller = getattr(error, "controller_failure", error)
    cause = next(iter(failures.values()), of_controller)
    cause = getattr(cause, "cause", cause)
    if isinstance(cause, ConfigError):
        return ConfigError(str(cause))
    what = f"{type(cause).__name__}: {cause}".splitlines()[0]
    return ServerError(f"training on Ray failed with {what}")


@contextmanager
def following(journal: Path, watch: Callable[[int, float], Any]) -> Iterator[None]:
    """Within: tell of a journal's updates and losses what its writer adds."""
    is_done = Event()

    def follow() -> None:
        while not is_done.wait(_FOLLOW_S):
            newest = _newest(journal)
            if newest is not None:
                watch(*newest)

    thread = Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


def _newest(journal: Path) -> tuple[int, float] | None:
    """The last update with a loss."""
    try:
        lines = journal.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the line that is being written
        if "loss" in entry:
            return int(entry["update"]), float(entry["loss"])
    return None
