"""Ray on this machine for a while: small, quiet, and all of it gone afterwards."""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import resource_tracker
from unittest import mock

from examples.ray_serve.app import require_ray
from examples.ray_serve.processes import ProcessWatch
from vllm_mtp.config import ConfigError

OBJECT_STORE_BYTES = 80 * 2**20
"""Requests and answers are small; Ray would take a third of the memory."""
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray lowers the priority of all it runs, and a server's neighbours would win.
    "RAY_worker_niceness": "0",
    # A full machine is its owner's affair: Ray would kill replicas.
    "RAY_memory_monitor_refresh_ms": "0",
    # Ray Serve LLM would set up an environment for each replica, for a hook that does
    # nothing.
    "RAYLLM_ENABLE_WORKER_PROCESS_SETUP_HOOK": "0",
    # The engine of a killed replica goes with it.
    "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "true",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
"""Of Ray's processes, and so of all that they start; the caller's own values win."""
NUM_STARTS = 4
"""Ray gives itself 30 s for each, which cannot be changed."""
MAX_FOLDER_CHARACTERS = 44
"""A socket's path may have 107 characters, of which Ray takes 63 below its folder."""


class LeftBehindError(RuntimeError):
    """Processes outlived the cluster; they have been ended."""


@contextmanager
def local_ray(
    num_cpus: int, variables: Mapping[str, str] | None = None
) -> Iterator[ProcessWatch]:
    """Within: a cluster of this machine alone, to which this process is connected.

    Args:
        num_cpus: That Ray may give away, whatever the machine has.
        variables: More of the environment of its processes.

    Yields:
        All processes that were started within.

    Raises:
        ConfigError: Ray is not installed, or the folder for temporary files has too
            long a name.
        LeftBehindError: A process had to be ended.
    """
    require_ray()
    folder = _short_folder()
    # Python's own, which runs as long as this process does.
    resource_tracker.ensure_running()
    wanted = ENVIRONMENT | dict(variables or {})
    missing = {k: v for k, v in wanted.items() if k not in os.environ}
    try:
        # Ray reads some of them when it is imported.
        with mock.patch.dict(os.environ, missing), ProcessWatch() as watch:
            yield from _running(num_cpus, folder, watch)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _running(num_cpus: int, folder: str, watch: ProcessWatch) -> Iterator[ProcessWatch]:
    import ray
    from ray import serve

    try:
        _start(num_cpus, folder)
        yield watch
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
        left = watch.end_all()
        if left:
            raise LeftBehindError(f"had to be ended: {'; '.join(left.values())}")


def _start(num_cpus: int, folder: str) -> None:
    """Again where Ray has not waited long enough, on a crowded machine."""
    import ray

    for attempt in range(1, NUM_STARTS + 1):
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.WARNING,
                _temp_dir=folder,
                # Nothing listens to other machines.
                _node_ip_address="127.0.0.1",
            )
            return
        except Exception as error:
            ray.shutdown()
            if attempt == NUM_STARTS or "timed out during startup" not in str(error):
                raise


def _short_folder() -> str:
    folder = tempfile.mkdtemp(prefix="ray-")
    if len(folder) > MAX_FOLDER_CHARACTERS:
        os.rmdir(folder)
        raise ConfigError(
            f"TMPDIR={tempfile.gettempdir()!r} is not allowed: must have at most "
            f"{MAX_FOLDER_CHARACTERS - len('/ray-12345678')} characters, or the names "
            "of Ray's sockets become too long"
        )
    return folder
