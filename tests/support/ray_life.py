"""A local Ray from its start to its end, and all that is tried with it meanwhile.

In a process of its own, forked from one that has imported vLLM: Ray and Ray Serve LLM
change the process that they run in.
"""

import io
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from examples.ray_serve.__main__ import DemoOptions, ask, print_counts, stream
from examples.ray_serve.app import AppOptions
from examples.ray_serve.by_replica import read_counts
from examples.ray_serve.clients import Clients, Tally, connect
from examples.ray_serve.cluster import local_ray
from examples.ray_serve.local import LocalApplication
from examples.ray_serve.processes import ProcessWatch
from tests.support import ray_messages
from tests.support.engines import draft_counts, engine, forking_servers, greedy
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts, heldout_texts
from tests.support.ray_executor import SEEN_FILE, cores_for_gpus
from tests.support.weight_layouts import MODEL_FILE, save, split

WAIT_S = 300
"""For what Serve does by itself, on a crowded machine."""
NUM_TOKENS = 32
NUM_TEXTS = 8
REQUESTS_AT_ONCE = 3
"""Of a replica: as many may be lost with it."""
QUICK = {
    "target_ongoing_requests": 0.02,
    "upscale_delay_s": 0.2,
    "downscale_delay_s": 0.5,
    "metrics_interval_s": 0.2,
    "look_back_period_s": 5.0,
}
"""Autoscaling that a test can wait for, by a load that leaves cores to replicas that
start: a request now and then is enough."""
PAUSE_S = 3.0
"""Of a client of that load. vLLM's workers spin for a second after each step."""


def run_in_fork(folder: str) -> None:
    """Start Ray, try everything, stop Ray, and write down what was found."""
    life = _Life(Path(folder))
    life.without_speculation()
    os.environ.update(forking_servers(os.environ))
    os.environ[SEEN_FILE] = str(Path(folder) / "seen.json")
    with local_ray(num_cpus=4) as watch:
        life.executor(watch)
        life.serve(watch)
    life.found["left"] = list(watch.living().values())
    (Path(folder) / "found.json").write_text(json.dumps(life.found))


class _Life:
    """What is tried, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[str, Any] = {
            "seconds": {},
            "requests_at_once": REQUESTS_AT_ONCE,
        }
        self._prompts = heldout_prompts(NUM_TEXTS, max_tokens=48)
        self._began_s = time.monotonic()

    def _done(self, phase: str) -> None:
        now_s = time.monotonic()
        self.found["seconds"][phase] = round(now_s - self._began_s, 1)
        self._began_s = now_s

    def without_speculation(self) -> None:
        """What all answers must be."""
        with engine(BUNDLED_CHECKPOINT) as llm:
            tokens = greedy(llm, self._prompts, NUM_TOKENS)
            tokenizer = llm.get_tokenizer()
        self._expected = tokens
        self.found["texts"] = [tokenizer.decode(each) for each in tokens]
        self._done("without speculation")

    # -- Ray as executor --------------------------------------------------------------

    def executor(self, watch: ProcessWatch) -> None:
        """Workers are actors; one dies."""
        import ray

        self.found["object_store_bytes"] = ray.cluster_resources()[
            "object_store_memory"
        ]
        with (
            cores_for_gpus() as executor,
            engine(
                BUNDLED_CHECKPOINT,
                speculative_config={"method": "mtp_plus"},
                distributed_executor_backend=executor,
            ) as llm,
        ):
            self.found["worker_pids"] = list(watch.living("CPURayWorker"))
            self.found["seen"] = json.loads(Path(os.environ[SEEN_FILE]).read_text())
            self.found["crossed"] = ray_messages.crossed()
            self.found["executor_equals"] = self._equals(llm)
            counts = draft_counts(llm)
            self.found["executor_num_accepted"] = counts.num_accepted_tokens
            llm.collective_rpc("reload_weights")
            self.found["equals_after_update"] = self._equals(llm)
            os.kill(self.found["worker_pids"][0], signal.SIGKILL)
            self.found["worker_error"] = _error_of(lambda: self._equals(llm))
        self._done("executor")

    def _equals(self, llm: Any) -> bool:
        return greedy(llm, self._prompts, NUM_TOKENS) == self._expected

    # -- Ray Serve --------------------------------------------------------------------

    def serve(self, watch: ProcessWatch) -> None:
        """Replicas come, die and go."""
        options = AppOptions(
            str(BUNDLED_CHECKPOINT),
            max_replicas=2,
            requests_at_once=REQUESTS_AT_ONCE,
            warm_start_path=str(self.folder / "warm"),
            cpu=True,
            dtype="float32",
            autoscaling=QUICK,
        )
        application = LocalApplication(options, watch)
        self.found["num_processes"] = len(watch.living())
        self._done("one replica")
        self._answers(application)
        self._scales_up_and_one_dies(application)
        self._scales_down(application)
        if "LONG_TESTS" in os.environ:
            self._is_updated(application)

    def _texts(self) -> list[str]:
        return heldout_texts()[:NUM_TEXTS]

    def _answers(self, application: LocalApplication) -> None:
        client = connect(application.url)
        text = self._texts()[0]
        self.found["streamed"] = list(stream(client, text, NUM_TOKENS))
        self.found["streamed_text"] = Clients(application.url, 1).ask(text, NUM_TOKENS)
        self._shows_the_demo(application)
        self.found["refused"] = _error_of(
            lambda: Clients(application.url, 1).ask(text, 4, {"mtp_plus_k": 99})
        )

    def _shows_the_demo(self, application: LocalApplication) -> None:
        """What ``make demo-ray`` does, with one replica."""
        shown = Console(file=io.StringIO(), width=100)
        options = DemoOptions(replicas=1, max_tokens=NUM_TOKENS)
        tally, counts = ask(application, self._texts(), options, shown)
        print_counts(counts, tally, shown)
        self.found["demo"] = shown.file.getvalue()

    def _scales_up_and_one_dies(self, application: LocalApplication) -> None:
        """Under load that goes on: two replicas, then one of them is killed."""
        with _Load(application, 2, self._prompts, PAUSE_S) as load:
            application.wait_for(
                lambda: application.num_running() == 2, "two replicas", WAIT_S
            )
        self.found["scaled_up"] = asdict(load.tally)
        self._done("second replica")
        with _Load(application, 4 * REQUESTS_AT_ONCE, self._prompts) as load:
            # Between the loads the autoscaler may have begun to stop one of them: a
            # replica that stops or starts is answering nobody.
            application.wait_for(
                lambda: _both_answer(application), "two replicas that answer", WAIT_S
            )
            load.wait_for_answers(4 * REQUESTS_AT_ONCE)
            self.found["counts"] = {k: asdict(v) for k, v in read_counts().items()}
            victim = application.replica_pids()[0]
            os.kill(victim, signal.SIGKILL)
            load.wait_for_answers(4 * REQUESTS_AT_ONCE)
            application.wait_for(
                lambda: victim not in application.replica_pids(), "its end", WAIT_S
            )
        self._done("killed")
        self.found["killed"] = asdict(load.tally)

    def _scales_down(self, application: LocalApplication) -> None:
        application.wait_for(
            lambda: (
                application.num_running() == 1 and len(application.replica_pids()) == 1
            ),
            "one replica",
            WAIT_S,
        )
        self._done("scaled down")

    def _is_updated(self, application: LocalApplication) -> None:
        """Other MTP layers, while requests come."""
        before = application.replica_pids()
        head = str(_other_head(self.folder / "head"))
        with _Load(application, 2, self._prompts, PAUSE_S) as load:
            application.change(head=head, max_replicas=1)
            load.wait_for_answers(4)
        self.found["updated"] = asdict(load.tally)
        self.found["replaced"] = not set(before) & set(application.replica_pids())
        self.found["warm_files"] = [p.name for p in (self.folder / "warm").iterdir()]
        self._done("updated")


def _both_answer(application: LocalApplication) -> bool:
    return (
        application.num_running() == len(application.replica_pids()) == 2
        and len(read_counts()) == 2
    )


class _Load:
    """Requests that keep coming, with the same prompts over and over."""

    def __init__(
        self,
        application: LocalApplication,
        num_at_once: int,
        prompts: tuple[tuple[int, ...], ...],
        pause_s: float = 0.0,
    ) -> None:
        self._clients = Clients(application.url, num_at_once, pause_s)
        self._prompts = [list(prompt) for prompt in prompts]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._send)

    @property
    def tally(self) -> Tally:
        return self._clients.tally

    def __enter__(self) -> "_Load":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _send(self) -> None:
        self._clients.send_until(self._is_over.is_set, self._prompts, NUM_TOKENS)

    def wait_for_answers(self, more: int) -> None:
        """So many more than now."""
        wanted = len(self.tally.texts) + more
        deadline_s = time.monotonic() + WAIT_S
        while len(self.tally.texts) < wanted:
            assert time.monotonic() < deadline_s, self.tally
            assert self._thread.is_alive(), self.tally
            time.sleep(0.05)


def _error_of(run: Callable[[], Any]) -> str:
    """What it is refused with; empty if it is not."""
    with suppress(SystemExit):
        try:
            run()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def _other_head(folder: Path) -> Path:
    """MTP layers of the same shape that nobody has trained: hardly any is accepted."""
    shutil.copytree(BUNDLED_CHECKPOINT, folder)
    own = split(folder)[1]
    torch.manual_seed(0)
    save({k: torch.randn_like(v) * 0.02 for k, v in own.items()}, folder / MODEL_FILE)
    return folder
