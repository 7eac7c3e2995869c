"""The traffic that a head is adapted to, and the process that does it.

Of the first rank of an engine. Requests are recorded only while there is room in the
inbox that the trainer empties, so a slow trainer costs neither memory nor time.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from vllm_mtp.config import METHOD, MTPPlusConfig
from vllm_mtp.drafting.vocabulary import default_num_rows
from vllm_mtp.integration.worker.hidden_states import Recorder
from vllm_mtp.metrics import stats
from vllm_mtp.tune.adapting import AdaptingPlan, State, head_folder, read_state
from vllm_mtp.tune.reservoir import INBOX, INBOX_SHARE, num_waiting_bytes
from vllm_mtp.tune.trainer_process import CANNOT_ADAPT

logger = init_logger("vllm.mtp_plus")

MEMORY_FOLDER = Path("/dev/shm")
MAX_STEPS = 3
"""Draft steps that are trained, as FastMTP (arXiv 2509.18362): later ones follow."""
TRAINER = (sys.executable, "-m", "vllm_mtp.tune.trainer_process")
MAX_STARTS = 3
"""Of a trainer that ends by itself."""
_TEXTS = 64
"""That the inbox has room for."""
_MIN_TEXT_TOKENS, _MAX_TEXT_TOKENS = 128, 4096
_TEXTS_AT_ONCE = 16
"""Requests that are recorded at a time, and texts of a shard."""
_LONGEST_WAIT_S = 5.0
"""Of a text, before it is written."""


def num_free_bytes() -> int:
    """That texts may take."""
    if not os.access(MEMORY_FOLDER, os.W_OK):
        return 0
    return shutil.disk_usage(MEMORY_FOLDER).free // 2


class Traffic:
    """Recorded requests and what their trainer says."""

    def __init__(self, vllm_config: Any, own: MTPPlusConfig) -> None:
        """Start the trainer.

        Args:
            vllm_config: vLLM's.
            own: Our options.
        """
        model = vllm_config.model_config
        self.folder = Path(tempfile.mkdtemp(prefix=f"{METHOD}-", dir=MEMORY_FOLDER))
        max_bytes = min(own.adapt_memory_mib << 20, num_free_bytes())
        self._inbox_bytes = max_bytes // INBOX_SHARE
        token_bytes = model.get_hidden_size() * model.dtype.itemsize
        most = self._inbox_bytes // token_bytes // _TEXTS // 2
        text_tokens = max(_MIN_TEXT_TOKENS, min(_MAX_TEXT_TOKENS, most))
        self._text_bytes = 2 * text_tokens * token_bytes
        self.recorder: Recorder | None = Recorder(
            self.folder / INBOX,
            max_text_tokens=text_tokens,
            admits=self._admits,
        )
        self._trainer = _Trainer(_plan(vllm_config, own, self.folder, max_bytes))
        self._waiting_bytes = 0
        self._wrote_at_s = time.monotonic()
        self._state = State()
        self._served, self._has_news = 0, True

    def _admits(self, request: Any) -> bool:
        recorder = self.recorder
        if recorder is None or recorder.num_running >= _TEXTS_AT_ONCE:
            return False
        num_texts = recorder.num_running + recorder.num_ended + 1
        return self._waiting_bytes + num_texts * self._text_bytes <= self._inbox_bytes

    def look(self) -> tuple[int, str | None] | None:
        """Number and folder of the head that shall be served; None: nobody says."""
        if self.recorder is None:
            return None
        try:
            self._write_texts(self.recorder)
            if not self._trainer.goes_on():
                raise OSError("the trainer does not work")
            state = read_state(self.folder)
        except FileNotFoundError:
            return None  # it is starting
        except (OSError, ValueError, TypeError) as error:
            logger.warning("mtp_plus: adapting has ended: %s", error)
            self.close()
            return None
        self._has_news = self._has_news or state != self._state
        self._state, number = state, state.served
        return number, str(head_folder(self.folder, number)) if number else None

    def _write_texts(self, recorder: Recorder) -> None:
        now_s = time.monotonic()
        has_waited = now_s - self._wrote_at_s > _LONGEST_WAIT_S
        if recorder.num_ended >= _TEXTS_AT_ONCE or has_waited:
            self._wrote_at_s = now_s
            recorder.write()
        self._waiting_bytes = num_waiting_bytes(self.folder)

    def serves(self, number: int) -> None:
        """Another head is loaded: say so."""
        what = f"head {number}, adapted" if number else "the head of the start again"
        logger.info("mtp_plus: serves %s: %s", what, self._state.reason)
        self._served, self._has_news = number, True

    def close(self) -> None:
        """End the trainer and forget the texts; twice changes nothing."""
        self.recorder, self._has_news = None, True
        self._trainer.end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def take_levels(self) -> Mapping[str, float]:
        """The same if something is new; else empty."""
        if not self._has_news:
            return {}
        self._has_news = False
        return self.levels

    @property
    def levels(self) -> Mapping[str, float]:
        """For the metrics; without what is not known."""
        state = self._state
        found = {
            stats.ADAPTING: float(self.recorder is not None),
            stats.ADAPTED_HEAD: float(self._served),
            stats.ADAPTED_TOKENS: float(state.num_tokens),
            stats.HEADS_ADOPTED: float(state.num_adopted),
            stats.HEADS_TAKEN_BACK: float(state.num_taken_back),
            stats.LENGTH_SERVED: state.length_served,
            stats.LENGTH_FIRST: state.length_first,
            stats.LENGTH_TRAINED: state.length_trained,
        }
        return {name: each for name, each in found.items() if each == each}


def _plan(
    vllm_config: Any, own: MTPPlusConfig, folder: Path, max_bytes: int
) -> AdaptingPlan:
    model = vllm_config.model_config
    draft = vllm_config.speculative_config.draft_model_config
    num_rows = default_num_rows(model.get_vocab_size(), 1)
    has_own = draft.model != model.model
    return AdaptingPlan(
        folder=folder,
        model=model.model,
        revision=model.revision,
        head=draft.model if has_own else None,
        head_revision=draft.revision if has_own else None,
        num_steps=min(vllm_config.num_speculative_tokens, MAX_STEPS),
        num_rows=num_rows or 0,
        max_bytes=max_bytes,
        device=own.adapt_device,
        share=own.adapt_share,
        busy_cores=tuple(sorted(busy_cores())),
    )


def busy_cores() -> Collection[int]:
    """That threads of this process are bound to."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended
            found |= os.sched_getaffinity(int(thread))
    return found


class _Trainer:
    """The process, started again if it ends by itself."""

    def __init__(self, plan: AdaptingPlan) -> None:
        """Start it."""
        self._plan_file = plan.folder / "plan.json"
        self._plan_file.write_text(plan.model_dump_json(), encoding="utf-8")
        self._log_file = plan.folder / "trainer.log"
        self._num_starts = 0
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._num_starts += 1
        with self._log_file.open("wb") as log:
            return subprocess.Popen(
                [*TRAINER, str(self._plan_file)],
                stdin=subprocess.PIPE,  # closed when this process ends: so it ends,
                start_new_session=True,  # and not before, by a signal to all of us
                stdout=log,
                stderr=log,
            )

    def goes_on(self) -> bool:
        """Whether it runs, or runs again."""
        code = self._process.poll()
        if code is None:
            return True
        logger.warning(
            "mtp_plus: the trainer has ended (exit code %s): %s",
            code,
            self._last_words() or "it said nothing",
        )
        if self._num_starts == MAX_STARTS or code == CANNOT_ADAPT:
            return False
        self.end()
        self._process = self._start()
        return True

    def _last_words(self) -> str:
        lines = self._log_file.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def end(self) -> None:
        """It is ended, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
