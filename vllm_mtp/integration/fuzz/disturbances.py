"""Disturbs an engine as ``tools/fuzz_axes.py`` says.

As vLLM's server does, which is told so between two steps: a pause first takes in what
is under way, then empties the caches (``EngineCoreProc.pause_scheduler``).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.request import RequestStatus

RESET, CLEAR, SLEEP = "reset", "pause and clear", "sleep"
ABORTING = "pause and abort"


class Disturbances:
    """Of one play."""

    def __init__(
        self,
        engine: LLMEngine,
        step: Callable[[], None],
        abort_all: Callable[[], None],
    ) -> None:
        """Nothing is disturbed yet.

        Args:
            engine: In this process.
            step: Makes a step of it and takes what comes.
            abort_all: Aborts all requests that are under way.
        """
        self.num_done = 0
        """Disturbances that met requests."""
        self._engine = engine
        self._core = engine.engine_core.engine_core
        self._step, self._abort_all = step, abort_all
        self._num_steps_left: int | None = None

    @property
    def is_paused(self) -> bool:
        """Whether the engine makes no steps for now."""
        return self._num_steps_left is not None

    def begin(self, event: Mapping[str, Any]) -> None:
        """Disturb the engine; while it is paused, nothing more happens to it."""
        if self.is_paused:
            return
        self.num_done += self._engine.has_unfinished_requests()
        what = event["what"]
        if what == RESET:
            with self._refused_for_sessions():
                assert self._engine.reset_prefix_cache(reset_running_requests=True)
            return
        self._pause(what)
        self._num_steps_left = event["lasts"]

    def pass_step(self) -> None:
        """A step of the play goes by while the engine is paused."""
        assert self._num_steps_left is not None
        self._num_steps_left -= 1
        if self._num_steps_left < 0:
            self._num_steps_left = None
            # Wakes up, too.
            assert self._engine.wake_up()

    def _pause(self, what: str) -> None:
        scheduler = self._core.scheduler
        if what == ABORTING:
            scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
            scheduler.set_pause_state(PauseState.PAUSED_NEW)
            self._abort_all()
        else:
            scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while scheduler.has_requests() or self._core.batch_queue:
            self._step()
        with self._refused_for_sessions():
            if what == SLEEP:
                self._engine.sleep(level=1, mode="keep")
            else:
                self._core._finish_pause(clear_cache=what in (CLEAR, ABORTING))

    @contextmanager
    def _refused_for_sessions(self) -> Iterator[None]:
        """A session between two chunks holds blocks, so nothing is emptied.

        A server tells its client so and goes on; who ran has been preempted anyway.
        """
        try:
            yield
        except RuntimeError:
            requests = self._core.scheduler.requests.values()
            if not any(each.resumable for each in requests):
                raise
