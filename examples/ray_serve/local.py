"""The application on this machine: started, changed and asked, as long as needed."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from examples.ray_serve.app import APPLICATION, DEPLOYMENT, AppOptions, make_application
from examples.ray_serve.cluster import local_ray
from examples.ray_serve.processes import ProcessWatch
from vllm_mtp.tools.ray_cluster import check_room
from vllm_mtp.tools.server_process import ServerError, find_cause, free_ports

POLL_S = 0.2


class LocalApplication:
    """Replicas behind an endpoint of the loopback interface."""

    def __init__(self, options: AppOptions, watch: ProcessWatch) -> None:
        """Start it and wait until it answers.

        Args:
            options: Of the application.
            watch: Of the cluster's processes.

        Raises:
            ConfigError: The machine has too few GPUs; Ray would wait for more.
            ServerError: Replicas do not start; it says why.
        """
        from ray import serve

        check_room(options.min_replicas, "replicas", not options.cpu)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}/v1"
        self.options, self.watch = options, watch
        serve.start(
            http_options={"host": "127.0.0.1", "port": port},
            logging_config={"log_level": "WARNING"},
        )
        self._run()

    def change(self, **options: Any) -> None:
        """Other options: Serve starts, stops or replaces replicas as they need it."""
        self.options = replace(self.options, **options)
        self._run()

    def _run(self) -> None:
        from ray import serve

        application = make_application(self.options)
        try:
            serve.run(application, name=APPLICATION)
        except RuntimeError as error:
            # It names the deployment; the status of that has what its replica said,
            # the first cause last.
            status = serve.status().applications[APPLICATION].deployments[DEPLOYMENT]
            cause = find_cause(status.message.splitlines()[::-1]) or error
            raise ServerError(f"no replica has started: {cause}") from None

    def replica_pids(self) -> list[int]:
        """Processes of the replicas, those that still start among them."""
        return sorted(self.watch.living(DEPLOYMENT))

    def num_running(self) -> int:
        """Replicas that take requests."""
        from ray import serve

        status = serve.status().applications[APPLICATION].deployments[DEPLOYMENT]
        states = status.replica_states.items()
        return sum(n for state, n in states if state == "RUNNING")

    def wait_for(self, done: Callable[[], bool], what: str, timeout_s: float) -> float:
        """Wait for something that Serve does by itself.

        Returns:
            Seconds that it took.

        Raises:
            ServerError: It did not happen.
        """
        began_s = time.monotonic()
        while not done():
            if time.monotonic() - began_s > timeout_s:
                raise ServerError(f"{what}: not within {timeout_s:.0f} s")
            time.sleep(POLL_S)
        return time.monotonic() - began_s


@contextmanager
def local_application(options: AppOptions) -> Iterator[LocalApplication]:
    """Within: the application, on a Ray of its own. Afterwards no process is left.

    Raises:
        ConfigError: An option is wrong, or Ray is not installed.
        ServerError: Replicas do not start.
        LeftBehindError: A process had to be ended.
    """
    # What is in a folder is not looked for elsewhere.
    variables = {"HF_HUB_OFFLINE": "1"} if Path(options.model).is_dir() else {}
    with local_ray(options.max_replicas + 2, variables) as watch:
        yield LocalApplication(options, watch)
