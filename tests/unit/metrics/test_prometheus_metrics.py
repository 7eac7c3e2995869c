"""What is scraped is what was counted."""

from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.metrics.speculation_samples import some
from vllm_mtp.metrics.prometheus import (
    PREFIX,
    Kinds,
    SpeculationMetrics,
    metric_names,
)
from vllm_mtp.metrics.stats import LEVELS, REASONS, UNPROFITABLE

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape() -> Samples:
    families = text_string_to_metric_families(generate_latest(REGISTRY).decode())
    return {
        (sample.name.removeprefix(PREFIX), tuple(sorted(sample.labels.items()))): value
        for family in families
        for sample in family.samples
        if (value := sample.value) is not None and sample.name.startswith(PREFIX)
        and not sample.name.endswith("_created")
    }  # fmt: skip


def labels(engine: int = 0, **own: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted({"model_name": "m", "engine": str(engine), **own}.items()))


def test_counts_are_added_engine_by_engine() -> None:
    metrics = SpeculationMetrics("m", [0, 1], 3)
    metrics.add(some(), 0)
    metrics.add(some(), 0)
    metrics.add(some(), 1)
    found = scrape()
    assert found["request_steps_total", labels(draft_length="2")] == 20
    assert found["request_steps_total", labels(1, draft_length="0")] == 5
    assert found["accepted_tokens_total", labels(position="1")] == 12
    assert found["rejected_slots_total", labels(1)] == 6
    assert found["saved_seconds", labels()] == 0.8
    assert found["draft_vocab_coverage", labels(1)] == 0.98
    reason = "request_steps_without_draft_total"
    assert found[reason, labels(reason=UNPROFITABLE)] == 8


def test_series_exist_before_anything_is_counted() -> None:
    SpeculationMetrics("m", [0], 3)
    found = scrape()
    assert {name for name, _ in found} >= {
        name.removeprefix(PREFIX) for name in metric_names() if name.endswith("_total")
    }
    assert all(value == 0 for value in found.values())
    reasons = {dict(own).get("reason") for name, own in found if "without" in name}
    assert reasons == set(REASONS)


def test_every_metric_is_named() -> None:
    metrics = SpeculationMetrics("m", [0], 3)
    stats = some()
    stats.levels = dict.fromkeys(LEVELS, 0.5)
    metrics.add(stats, 0)
    assert {PREFIX + name for name, _ in scrape()} == set(metric_names())


def test_a_second_server_in_the_process_starts_from_zero() -> None:
    SpeculationMetrics("m", [0], 3).add(some(), 0)
    SpeculationMetrics("m", [0], 5)
    assert scrape()["request_steps_total", labels(draft_length="2")] == 0


class _Noted:
    """A metric of another kind, as Ray's are: built and used as Prometheus' own."""

    made: list[tuple[str, tuple[str, ...]]]

    def __init__(self, name, documentation="", labelnames=(), multiprocess_mode=""):
        self.made.append((name, tuple(labelnames)))
        self.value = 0.0

    def labels(self, *values):
        return self

    def inc(self, value=1.0):
        self.value += value

    def set(self, value):
        self.value = value


def test_metrics_may_be_of_another_kind() -> None:
    _Noted.made = []
    before = set(scrape())
    metrics = SpeculationMetrics("m", [0], 3, Kinds(_Noted, _Noted))
    metrics.add(some(), 0)
    names = {name for name, _ in _Noted.made}
    assert {f"{PREFIX}request_steps", f"{PREFIX}saved_seconds"} <= names
    assert len(names) == len(metric_names())
    assert all(labels[:2] == ("model_name", "engine") for _, labels in _Noted.made)
    # None of them is among Prometheus' own.
    assert set(scrape()) <= before
