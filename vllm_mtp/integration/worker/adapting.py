"""Adapts the MTP layers to the traffic while they serve (`adapt`).

The worker's side: hidden states of some requests go into a reservoir in memory, a
process of its own trains on them (``tune/trainer_process.py``), and between two steps
the worker loads the head that this process has found to be better, or takes it back.
Rank 0 looks, and tells the other tensor-parallel ranks in the same step. Drafts of any
head are verified by the target: nothing of this reaches the text.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from vllm_mtp.config import ConfigError
from vllm_mtp.integration.load.settings import settings_of
from vllm_mtp.integration.scheduler.messages import WorkerReport
from vllm_mtp.integration.worker.hidden_states import Recorder, StepRows
from vllm_mtp.integration.worker.weight_updates import TARGET, FollowsWeights
from vllm_mtp.tune.families import family_of

logger = init_logger("vllm.mtp_plus")

STEPS_BETWEEN_LOOKS = 64
MIN_BYTES = 2**26


def check_adapting(config: Any) -> None:
    """Refuse what cannot be adapted, before anything is loaded.

    Args:
        config: vLLM's, complete, with our options.

    Raises:
        ConfigError: One sentence.
    """
    why = _why_not(config)
    if why is not None:
        raise ConfigError(f"speculative_config.adapt is not allowed: {why}.")


def _why_not(config: Any) -> str | None:
    from vllm_mtp.integration.worker.traffic import MEMORY_FOLDER, num_free_bytes

    parallel = config.parallel_config
    if settings_of(config).hidden_states_path is not None:
        return "hidden_states_path records the same; give one of them"
    if parallel.data_parallel_size > 1:
        return (
            "data-parallel ranks would each learn for themselves; start a server for "
            "each"
        )
    if parallel.nnodes > 1:
        return "all ranks read one folder in memory; use one node"
    try:
        family_of(config.model_config.hf_config.to_dict())
    except ConfigError as error:
        return str(error).rstrip(".")
    if num_free_bytes() < MIN_BYTES:
        return (
            f"{MEMORY_FOLDER} must have {2 * MIN_BYTES >> 20} MiB free (of a "
            "container: --shm-size)"
        )
    return None


class Adapter:
    """Of one rank."""

    def __init__(self, traffic: Any, load_head: Callable[[str | None], None]) -> None:
        """
        Args:
            traffic: `Traffic`, of the first tensor-parallel rank; None on others.
            load_head: Loads MTP layers of a folder; of None, those of the start.
        """
        self._traffic, self._load_head = traffic, load_head
        self._served = 0
        self._steps_to_look = STEPS_BETWEEN_LOOKS
        self._is_broken = False

    @property
    def recorder(self) -> Recorder | None:
        """Of the first rank, while it adapts."""
        return None if self._traffic is None else self._traffic.recorder

    def before_step(self) -> None:
        """Now and then, look whether another head shall be served.

        All ranks count the same steps, so each comes here with the others.
        """
        self._steps_to_look -= 1
        if self._steps_to_look:
            return
        self._steps_to_look = STEPS_BETWEEN_LOOKS
        found = self._traffic.look() if self._traffic is not None else None
        wanted = get_tp_group().broadcast_object(found, src=0)
        if wanted is not None and wanted[0] != self._served and not self._is_broken:
            self._serve(*wanted)

    def _serve(self, number: int, folder: str | None) -> None:
        try:
            self._load_head(folder)
        except Exception as error:
            # Half of it may be loaded: drafts would be worse, the text the same.
            self._is_broken, number = True, 0
            self.stop(f"head {folder} could not be loaded: {error}")
            with suppress(Exception):
                self._load_head(None)
        self._served = number
        if self._traffic is not None:
            self._traffic.serves(number)

    def stop(self, why: str) -> None:
        """Adapt no more; the head that is served stays."""
        if self._traffic is not None and self._traffic.recorder is not None:
            logger.warning("mtp_plus: adapting has ended: %s", why)
            self._traffic.close()

    def close(self) -> None:
        """The server ends."""
        if self._traffic is not None:
            self._traffic.close()

    def take_levels(self) -> Mapping[str, float]:
        """For the metrics; empty if nothing is new."""
        return {} if self._traffic is None else self._traffic.take_levels()


class Adapts(FollowsWeights):
    """Mixin of drafters."""

    recorder: Recorder | None = None
    adapter: Adapter | None = None

    def begin_recording(self, scheduler_output: Any) -> None:
        """A step is about to run."""
        if self.adapter is not None:
            self.adapter.before_step()
            self.recorder = self.adapter.recorder
        if self.recorder is not None:
            with self._recording():
                self.recorder.begin_step(scheduler_output)

    @property
    def records_step(self) -> bool:
        """Whether a request of the step that runs is recorded."""
        return self.recorder is not None and self.recorder.num_running > 0

    def record(self, rows: StepRows) -> None:
        """Rows of such a step."""
        if self.recorder is not None:
            with self._recording():
                self.recorder.record(rows)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """To adapt is not worth a step; to record may be what an engine is for."""
        try:
            yield
        except Exception as error:
            if self.adapter is None:
                raise
            self.adapter.stop(f"requests could not be recorded: {error}")
            self.recorder = None

    def begin_anew(self, changed: Collection[str]) -> None:
        super().begin_anew(changed)
        if self.adapter is not None and TARGET in changed:
            # The trainer has read those of the checkpoint.
            self.adapter.stop("the target has new weights")

    def take_report(self) -> WorkerReport:
        report = super().take_report()
        levels = self.adapter.take_levels() if self.adapter is not None else None
        return report._replace(levels=levels) if levels else report


def adapter_of(
    vllm_config: Any, rank: int, load_head: Callable[[str | None], None]
) -> Adapter | None:
    """What adapts on a rank; None unless it was asked for.

    Args:
        vllm_config: With our options.
        rank: Of the worker.
        load_head: See `Adapter`.
    """
    own = settings_of(vllm_config)
    if not own.adapt:
        return None
    # Here, because the trainer's modules are of no use to others.
    from vllm_mtp.integration.worker.traffic import Traffic

    is_first = rank % vllm_config.parallel_config.tensor_parallel_size == 0
    return Adapter(Traffic(vllm_config, own) if is_first else None, load_head)
