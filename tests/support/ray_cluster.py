"""A real Ray cluster of this machine for tests, which leaves no process behind."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import psutil

OBJECT_STORE_BYTES = 80 * 2**20
GONE_AFTER_S = 20.0
NUM_STARTS = 4
"""Ray gives itself 30 s for each, which cannot be changed."""


@contextmanager
def ray_cluster(num_cpus: int) -> Iterator[None]:
    """Within: this process is the driver of a cluster with so many places."""
    import ray

    # Sockets lie in it, and their paths must be short: not in pytest's folder.
    folder = tempfile.mkdtemp(dir="/tmp", prefix="ray")
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # The machine's memory is watched by others; a full one must not kill engines.
        "RAY_memory_monitor_refresh_ms": "0",
        # Ray's workers yield to everybody (15), and starve beside another test.
        "RAY_worker_niceness": "0",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
        # Workers import what the tests import.
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    try:
        with mock.patch.dict("os.environ", variables):
            _start(num_cpus, folder)
            try:
                yield
            finally:
                started = _processes_of(folder)
                ray.shutdown()
        _assert_gone(started)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(num_cpus: int, folder: str) -> None:
    """Again if it took longer than Ray waits, on a crowded machine."""
    import ray

    for attempt in range(NUM_STARTS):
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=folder,
                log_to_driver=False,
                logging_level="WARNING",
            )
        except Exception as error:
            ray.shutdown()
            if "timed out during startup" not in str(error) or (
                attempt + 1 == NUM_STARTS
            ):
                raise
        else:
            return


def _processes_of(folder: str) -> list[psutil.Process]:
    """Ray's own, which name the folder, and what they have started: workers do not."""
    found = []
    for child in psutil.Process().children():
        if folder in " ".join(child.cmdline()):
            found += [child, *child.children(recursive=True)]
    return found


def _assert_gone(started: list[psutil.Process]) -> None:
    assert len(started) > 3, "at least the raylet and what it needs"
    _, left = psutil.wait_procs(started, GONE_AFTER_S)
    assert not left, f"left behind: {left}"
