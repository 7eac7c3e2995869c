"""The controlled scheduler, plus notes of rounds where they shall be shown."""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput

from vllm_mtp.integration.load.settings import settings_of
from vllm_mtp.integration.observe.step_metrics import ROUNDS_KEY, STATS_KEY
from vllm_mtp.integration.scheduler.controlled_scheduler import ControlledScheduler
from vllm_mtp.integration.scheduler.messages import report_of
from vllm_mtp.integration.scheduler.rounds import RoundNotes


class NotingScheduler(ControlledScheduler):
    """Tells `RoundNotes` of requests and of steps; without them as its base."""

    rounds: RoundNotes | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        max_requests = settings_of(self.vllm_config).show_rounds
        if max_requests and self.log_stats:
            self.rounds = RoundNotes(max_requests)

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        if self.rounds is not None and request.request_id in self.requests:
            self.rounds.begin(request)

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
    ) -> Any:
        if self.rounds is not None:
            report = report_of(model_runner_output)
            self.rounds.verified(scheduler_output, model_runner_output, report)
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats = super().make_stats(*args, **kwargs)
        if self.rounds is not None and stats is not None:
            of_plugins = stats.kv_connector_stats
            if of_plugins and STATS_KEY in of_plugins:
                of_plugins[ROUNDS_KEY] = self.rounds.take()
        return stats

    def _update_request_as_session(self, session: Any, update: Any) -> None:
        # While its output is what its rounds were.
        if self.rounds is not None:
            self.rounds.end(session.request_id)
        super()._update_request_as_session(session, update)

    def _forget(self, request_id: str) -> None:
        if self.rounds is not None:
            self.rounds.end(request_id)
        super()._forget(request_id)
