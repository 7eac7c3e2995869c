"""The counts as Prometheus metrics, beside vLLM's own on ``/metrics``.

Names begin with ``vllm_mtp:``, and labels are vLLM's: ``model_name`` and ``engine``.
Where vLLM's own are not of ``prometheus_client``, ours are of the same kind: in a
replica of Ray Serve Ray collects them, with a label for the replica (docs/ray.md).
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from prometheus_client import REGISTRY, Counter, Gauge

from vllm_mtp.metrics.stats import (
    FAILED_PARTS,
    LEVELS,
    PARTS,
    REASONS,
    SpeculationStats,
)

PREFIX = "vllm_mtp:"
LABELS = ("model_name", "engine")

_COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "request_steps": (
        "Requests that decoded, once for each step, by draft tokens verified (K).",
        ("draft_length",),
    ),
    "request_steps_without_draft": (
        "Requests that decoded without a draft, once for each step. By reason: "
        + "; ".join(f"{name}: {meaning}" for name, meaning in REASONS.items())
        + ". Until 0.1 exploration was called probe, and kv_backfill catching_up.",
        ("reason",),
    ),
    "draft_tokens": ("Draft tokens that the target verified.", ("position",)),
    "accepted_tokens": ("Draft tokens that the target accepted.", ("position",)),
    "rejected_slots": ("KV slots of rejected draft tokens, rolled back.", ()),
    "copied_tokens": (
        "Draft tokens that were copied from contexts, or stood where one was expected "
        "to go on; they are among draft_tokens.",
        (),
    ),
    "accepted_copied_tokens": ("Those of them that the target accepted.", ()),
    "step_seconds": (
        "Step time, divided by the cost model. By part: "
        + "; ".join(f"{name}: {meaning}" for name, meaning in PARTS.items())
        + ".",
        ("part",),
    ),
    "decode_tokens": (
        "Tokens that steps which only decode brought; accepted ones beyond the end of "
        "a request are among them, as in vLLM's own count of accepted tokens.",
        (),
    ),
    "promised_tokens": (
        "Tokens that the plans in force promised for the time of these steps.",
        (),
    ),
    "drafting_failures": (
        "Parts of drafting that broke: drafting is off for good then. By part: "
        + "; ".join(f"{name}: {meaning}" for name, meaning in FAILED_PARTS.items())
        + ".",
        ("part",),
    ),
    "acceptance_alarms": ("Times that acceptance fell below its own past.", ()),
}
"""Name without prefix and ``_total``: help, labels of its own."""

_SAVED = "saved_seconds"
_SAVED_HELP = "Estimated seconds that speculation has saved; falls while it costs time."
_GAUGES: Mapping[str, tuple[str, str]] = {
    **{name: (text, "mostrecent") for name, text in LEVELS.items()},
    # With several front ends each counts the steps that reach it.
    _SAVED: (_SAVED_HELP, "sum"),
}
"""Name without prefix: help, and what becomes of several front ends' values."""


def metric_names() -> list[str]:
    """All metrics as they are scraped."""
    counters = [f"{PREFIX}{name}_total" for name in _COUNTERS]
    return [*counters, *(f"{PREFIX}{name}" for name in (_SAVED, *LEVELS))]


class Kinds(NamedTuple):
    """Classes of metrics, which are built as those of ``prometheus_client`` are."""

    counter: Any = Counter
    gauge: Any = Gauge


class SpeculationMetrics:
    """The metrics of one server; several engines may report to it."""

    def __init__(
        self,
        model_name: str,
        engines: Iterable[int],
        max_draft_length: int,
        kinds: Kinds | None = None,
    ) -> None:
        """Register all metrics; those of a server before it in this process go.

        Args:
            model_name: As the server calls it.
            engines: Indices of the engines (data-parallel ranks).
            max_draft_length: ``K_max``.
            kinds: Classes of the metrics; None for those of ``prometheus_client``.
        """
        _unregister()
        kinds = kinds or Kinds()
        self._model_name = model_name
        self._counters = {
            name: kinds.counter(PREFIX + name, text, [*LABELS, *labels])
            for name, (text, labels) in _COUNTERS.items()
        }
        self._gauges = {
            name: kinds.gauge(PREFIX + name, text, LABELS, multiprocess_mode=mode)
            for name, (text, mode) in _GAUGES.items()
        }
        self._saved = dict.fromkeys(engines, 0.0)
        for engine in self._saved:
            # Series that exist from the start: rates work from the first count on.
            empty = SpeculationStats.empty(max_draft_length)
            empty.without_draft = dict.fromkeys(REASONS, 0)
            empty.seconds = dict.fromkeys(PARTS, 0.0)
            empty.failures = dict.fromkeys(FAILED_PARTS, 0)
            self.add(empty, engine)

    def add(self, stats: SpeculationStats, engine: int) -> None:
        """Counts of one engine since the last ones."""
        position = {str(j): n for j, n in enumerate(stats.drafted)}
        kept = {str(j): n for j, n in enumerate(stats.accepted)}
        lengths = {str(k): n for k, n in enumerate(stats.draft_lengths)}
        self._count("request_steps", engine, lengths)
        self._count("request_steps_without_draft", engine, stats.without_draft)
        self._count("draft_tokens", engine, position)
        self._count("accepted_tokens", engine, kept)
        self._count("step_seconds", engine, stats.seconds)
        self._count("drafting_failures", engine, stats.failures)
        for name, value in (
            ("rejected_slots", stats.num_rejected_slots),
            ("copied_tokens", stats.num_copied),
            ("accepted_copied_tokens", stats.num_copied_accepted),
            ("decode_tokens", stats.num_tokens),
            ("promised_tokens", stats.promised_tokens),
            ("acceptance_alarms", stats.num_alarms),
        ):
            self._child(self._counters[name], engine).inc(value)
        self._saved[engine] += stats.saved_seconds
        self._child(self._gauges[_SAVED], engine).set(self._saved[engine])
        for name, level in stats.levels.items():
            self._child(self._gauges[name], engine).set(level)

    def _count(self, name: str, engine: int, counts: Mapping[str, float]) -> None:
        for label, count in counts.items():
            self._child(self._counters[name], engine, label).inc(count)

    def _child(self, metric: Any, engine: int, *labels: str) -> Any:
        return metric.labels(self._model_name, str(engine), *labels)


def _unregister() -> None:
    # vLLM does the same with its own: a process may start one engine after another.
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith(PREFIX):
            REGISTRY.unregister(collector)
