"""A failure in drafting disables drafting for good; the target goes on alone.

Drafts never decide what is said, so nothing that breaks while they are made or planned
need end an engine. Who fails says so once, with a traceback, and is not asked again:
the worker's drafter hands out token 0 for drafts that it still owes, which are verified
like any others, and reports it to the scheduler, which from then on plans K = 0. The KV
of the MTP layers is then never read again, so it does not matter where a pass broke
off; the target's KV was rolled back before the drafter ran.

Where a failure of one rank would leave the others waiting in a collective (tensor or
pipeline parallel workers, data-parallel schedulers) it is raised instead.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from vllm.logger import init_logger

from vllm_mtp.integration.scheduler.messages import NOTHING, WorkerReport
from vllm_mtp.metrics.stats import FAILED_CONTROLLER, FAILED_DRAFTER

# Below "vllm", so that its log settings apply to our lines, too.
logger = init_logger("vllm.mtp_plus")

Answer = TypeVar("Answer")

_OFF = "Drafting is disabled for good: the %s failed. The server goes on without."


class DraftingSwitch:
    """Of a scheduler: whether anything has broken so far."""

    def __init__(self, vllm_config: Any, on_failure: Callable[[str], None]) -> None:
        """All is well.

        Args:
            vllm_config: vLLM's.
            on_failure: Called once for each part that fails.
        """
        self._failed: set[str] = set()
        self._is_alone = vllm_config.parallel_config.data_parallel_size == 1
        self._on_failure = on_failure

    @property
    def is_off(self) -> bool:
        return bool(self._failed)

    def failed(self, part: str) -> None:
        """A part of drafting is broken, and has said why."""
        if part not in self._failed:
            self._failed.add(part)
            self._on_failure(part)

    def ask(
        self, method: Callable[..., Answer], *args: Any, otherwise: Answer
    ) -> Answer:
        """What the controller answers, or what goes without it."""
        if self._failed:
            return otherwise
        try:
            return method(*args)
        except Exception:
            if not self._is_alone:
                raise
            logger.exception(_OFF, FAILED_CONTROLLER)
            self.failed(FAILED_CONTROLLER)
            return otherwise


class SurvivesFailure:
    """Mixin of drafters, in front of all others."""

    has_failed = False
    _is_reported = True
    vllm_config: Any
    pending: Any
    draft_vocab: Any
    mixes_draft_lengths = False
    """One full CUDA graph serves whatever mix of draft lengths a step has, where
    otherwise only equal ones have graphs."""

    def take_report(self) -> WorkerReport:
        """What the scheduler does not know yet: a failure, once."""
        if self._is_reported:
            return NOTHING
        self._is_reported = True
        return WorkerReport(failed_part=FAILED_DRAFTER)

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """What breaks inside is the end of drafting, not of the engine."""
        try:
            yield
        except Exception:
            if self.vllm_config.parallel_config.world_size_across_dp > 1:
                raise
            if not self.has_failed:
                logger.exception(_OFF, FAILED_DRAFTER)
            self.has_failed, self._is_reported = True, False
            # Nobody follows tokens or keeps rows for a drafter that is gone.
            self.pending = self.draft_vocab = None
