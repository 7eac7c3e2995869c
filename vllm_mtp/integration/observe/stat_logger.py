"""Our counts in the server's front end: metrics and a line in its log.

vLLM loads loggers of plugins from an entry point group, for every engine in the
process, and keeps statistics for their sake even where the user switched them off. So
ours joins the others when vLLM has made its own, and only for engines with our method.
It comes first: it takes our counts out of vLLM's statistics before others see them.
Its metrics are of the kind that vLLM's are: in a replica of Ray Serve LLM, Ray's.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vllm.logger import init_logger
from vllm.v1.metrics.loggers import (
    AggregateStatLoggerBase,
    PrometheusStatLogger,
    StatLoggerManager,
)

from vllm_mtp.integration.load.settings import SETTINGS_KEY, settings_of
from vllm_mtp.integration.load.synthetic_acceptance import is_synthetic
from vllm_mtp.integration.load.wrapping import wrap_once
from vllm_mtp.integration.observe.step_metrics import ROUNDS_KEY, STATS_KEY
from vllm_mtp.metrics.log_line import describe
from vllm_mtp.metrics.prometheus import Kinds, SpeculationMetrics
from vllm_mtp.metrics.stats import SYNTHETIC_ACCEPTANCE, SpeculationStats
from vllm_mtp.page.rounds import RecentRequests

# Below "vllm", so that its log settings apply to our lines, too.
logger = init_logger("vllm.mtp_plus")


class Taken(NamedTuple):
    """What is ours of vLLM's statistics."""

    stats: SpeculationStats
    rounds: Sequence[Mapping[str, Any]]
    """Changes of `page/rounds.py`."""


def take_stats(scheduler_stats: Any) -> Taken | None:
    """Our counts, taken out of vLLM's statistics.

    Args:
        scheduler_stats: vLLM's ``SchedulerStats``, or None.
    """
    of_plugins = getattr(scheduler_stats, "kv_connector_stats", None)
    if not of_plugins or STATS_KEY not in of_plugins:
        return None
    rest = dict(of_plugins)
    stats, rounds = rest.pop(STATS_KEY), rest.pop(ROUNDS_KEY, ())
    scheduler_stats.kv_connector_stats = rest or None
    return Taken(SpeculationStats.from_dict(stats), rounds)


class MTPPlusStatLogger(AggregateStatLoggerBase):
    """Feeds Prometheus, and says in words what happened since the last line."""

    def __init__(
        self,
        vllm_config: Any,
        engine_indexes: list[int],
        writes_lines: bool = True,
        kinds: Kinds | None = None,
    ) -> None:
        """Nothing has happened yet.

        Args:
            vllm_config: Of the engines.
            engine_indexes: Data-parallel ranks that report here.
            writes_lines: Whether vLLM itself writes lines about its statistics.
            kinds: Classes of the metrics; None for those of ``prometheus_client``.
        """
        self._max_draft_length = vllm_config.speculative_config.num_speculative_tokens
        self._levels = {SYNTHETIC_ACCEPTANCE: float(is_synthetic(vllm_config))}
        """What stays as it is; known before the first step."""
        self._writes_lines = writes_lines
        self._metrics = SpeculationMetrics(
            vllm_config.model_config.served_model_name,
            engine_indexes,
            self._max_draft_length,
            kinds,
        )
        own = settings_of(vllm_config)
        self.recent_requests = RecentRequests(own.show_rounds)
        self._interval = {engine: self._nothing() for engine in engine_indexes}
        for engine, stats in self._interval.items():
            self._metrics.add(stats, engine)

    def _nothing(self) -> SpeculationStats:
        stats = SpeculationStats.empty(self._max_draft_length)
        stats.levels |= self._levels
        return stats

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        taken = take_stats(scheduler_stats)
        if taken is not None and engine_idx in self._interval:
            self._metrics.add(taken.stats, engine_idx)
            self._interval[engine_idx].add(taken.stats)
            self.recent_requests.add(engine_idx, taken.rounds)

    def log(self) -> None:
        for engine, stats in self._interval.items():
            line = describe(stats)
            if line is not None and self._writes_lines:
                logger.info("Engine %03d: mtp_plus: %s", engine, line)
            self._interval[engine] = self._nothing()

    def log_engine_initialized(self) -> None:
        pass


def kinds_of(loggers: Iterable[Any]) -> Kinds:
    """Classes of vLLM's own metrics in this process."""
    for each in loggers:
        if isinstance(each, PrometheusStatLogger):
            return Kinds(each._counter_cls, each._gauge_cls)
    return Kinds()


def install() -> None:
    """Let our logger join vLLM's, for engines with our method. Safe to call twice."""
    wrap_once(StatLoggerManager, "__init__", _wrap)


def _wrap(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        if SETTINGS_KEY in vllm_config.additional_config:
            # With several front ends none sees all; vLLM writes no lines then either.
            writes_lines = (
                kwargs.get("enable_default_loggers", True)
                and kwargs.get("client_count", 1) == 1
            )
            ours = MTPPlusStatLogger(
                vllm_config,
                self.engine_indexes,
                writes_lines,
                kinds_of(self.stat_loggers),
            )
            self.stat_loggers.insert(0, ours)

    return __init__
