"""What the scheduler tells of its steps, and how it reaches the front end."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_mtp.control.fixed import FixedController
from vllm_mtp.integration.observe import step_metrics
from vllm_mtp.integration.observe.stat_logger import take_stats
from vllm_mtp.integration.observe.step_metrics import STATS_KEY, StepMetrics
from vllm_mtp.integration.scheduler.messages import (
    NOTHING,
    VocabularyState,
    WorkerReport,
    report_of,
    with_report,
)
from vllm_mtp.metrics.stats import SpeculationStats
from vllm_mtp.records import (
    DraftDecision,
    RequestOutcome,
    StepEstimate,
    StepOutcome,
    StopRule,
)

K_MAX = 4
RULE = StopRule({}, [0.0] * 5, 0.1)


def outcome(seconds: float = 0.1, **facts: Any) -> StepOutcome:
    usual = {"num_requests": 2, "num_scheduled_tokens": 6, "num_decode_requests": 2}
    return StepOutcome((), step_time_s=seconds, **usual | facts)


def taken(metrics: StepMetrics) -> SpeculationStats:
    data = metrics.take(is_idle=True)
    assert data is not None
    return SpeculationStats.from_dict(data)


@pytest.mark.parametrize(
    ("decision", "reason"),
    [
        (DraftDecision(0, {"a": 0}, "off"), "unprofitable"),
        (DraftDecision(2, {"a": 0, "b": 2}, "exploit"), "unprofitable"),
        (DraftDecision(2, {"a": 0, "b": 2}, "probe"), "exploration"),
        (DraftDecision(4, {"a": 4}, "exploit", RULE), "unsure"),
        (DraftDecision(4, {"a": 4}, "exploit"), "dropped"),
        (DraftDecision(2, {"b": 2}, "exploit"), "first_step"),
        (DraftDecision(0, {}, "prefill"), "first_step"),
        (DraftDecision(0, {"a": 0}, "random"), "other"),
    ],
)
def test_a_step_without_a_draft_has_a_reason(
    decision: DraftDecision, reason: str
) -> None:
    metrics = StepMetrics(FixedController(K_MAX), K_MAX)
    metrics.decided(decision, ())
    metrics.decoding_without_draft(["a"], pinned=())
    stats = taken(metrics)
    assert stats.without_draft == {reason: 1}
    assert stats.draft_lengths == [1, 0, 0, 0, 0]


def test_wishes_and_waiting_come_before_what_the_controller_said() -> None:
    metrics = StepMetrics(FixedController(K_MAX), K_MAX)
    metrics.decided(DraftDecision(4, {"a": 4, "b": 0}, "off"), {"a"})
    metrics.decoding_without_draft(["a", "b"], pinned={"b"})
    assert taken(metrics).without_draft == {"kv_backfill": 1, "pinned": 1}


def test_slots_of_tokens_that_the_grammar_forbids_are_rolled_back_too() -> None:
    metrics = StepMetrics(FixedController(K_MAX), K_MAX)
    verified = (
        RequestOutcome("a", 2, 1, num_forbidden=2),
        RequestOutcome("b", 3, 3),
    )
    metrics.finished(StepOutcome(verified, 2, 9, 0.1, num_decode_requests=2))
    stats = taken(metrics)
    assert stats.drafted == [2, 2, 1, 0]
    assert stats.accepted == [2, 1, 1, 0]
    assert stats.draft_lengths == [0, 0, 0, 1, 1]
    assert stats.num_rejected_slots == 3


def test_a_draft_that_the_device_left_out_is_none() -> None:
    metrics = StepMetrics(FixedController(K_MAX), K_MAX)
    left_out = RequestOutcome("a", 0, 0, num_left_out=3, num_would_be_accepted=1)
    metrics.finished(StepOutcome((left_out,), 1, 1, 0.1, num_decode_requests=1))
    stats = taken(metrics)
    assert stats.draft_lengths == [1, 0, 0, 0, 0]
    assert stats.without_draft == {"unsure": 1}
    assert not sum(stats.drafted) + stats.num_rejected_slots


def test_step_time_is_divided_as_estimated_and_scaled_to_what_was_measured() -> None:
    known = StepEstimate(target_s=0.04, verify_s=0.005, draft_s=0.005, goodput=70.0)
    controller = SimpleNamespace(estimate=lambda outcome: known, calibration_error=0.1)
    metrics = StepMetrics(SimpleNamespace(controller=controller), K_MAX)
    drafts = tuple(RequestOutcome(name, 2, 2) for name in "ab")
    metrics.finished(StepOutcome(drafts, 2, 6, 0.1, num_decode_requests=2))
    metrics.finished(outcome(0.3, num_prefill_tokens=50))
    stats = taken(metrics)
    assert stats.seconds == pytest.approx(
        {"target": 0.08, "verify": 0.01, "draft": 0.01, "prefill": 0.3}
    )
    assert stats.num_tokens == 6
    assert stats.promised_tokens == pytest.approx(7.0)
    assert stats.saved_seconds == pytest.approx(3 * 0.08 - 0.1)
    assert stats.levels["calibration_error"] == 0.1


def test_without_a_cost_model_a_step_is_one_piece() -> None:
    metrics = StepMetrics(FixedController(K_MAX), K_MAX)
    metrics.finished(outcome(0.1))
    stats = taken(metrics)
    assert stats.seconds == {"whole": 0.1}
    assert stats.saved_seconds == 0.0
    assert "calibration_error" not in stats.levels


def test_a_fall_of_acceptance_is_warned_of_and_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_metrics, "logger", logging.getLogger("test.drift"))
    metrics = StepMetrics(FixedController(K_MAX), K_MAX)

    def serve(num_requests: int, num_accepted_of_20: int) -> None:
        for number in range(num_requests):
            for step in range(20):
                accepted = int(step < num_accepted_of_20)
                drafts = (RequestOutcome(f"r{number}", 1, accepted),)
                metrics.finished(StepOutcome(drafts, 1, 2, 0.1, num_decode_requests=1))
            metrics.ended(f"r{number}", is_greedy=True)

    serve(200, 16)
    assert not caplog.records
    serve(50, 4)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    stats = taken(metrics)
    assert stats.num_alarms == 1
    assert stats.levels["acceptance_has_drifted"] == 1.0
    assert stats.levels["first_acceptance_baseline"] == pytest.approx(0.8)


def test_counts_are_handed_over_a_few_times_a_second_and_at_the_end() -> None:
    metrics = StepMetrics(FixedController(K_MAX), K_MAX)
    assert metrics.take(is_idle=False) is not None
    metrics.finished(outcome(0.1))
    assert metrics.take(is_idle=False) is None
    assert taken(metrics).seconds == {"whole": 0.1}


def test_our_counts_are_taken_out_and_those_of_other_plugins_stay() -> None:
    counts = SpeculationStats.empty(K_MAX).to_dict()
    stats = SimpleNamespace(kv_connector_stats={STATS_KEY: counts, "nixl": 1})
    assert take_stats(stats) == (SpeculationStats.empty(K_MAX), ())
    assert stats.kv_connector_stats == {"nixl": 1}
    assert take_stats(stats) is None
    alone = SimpleNamespace(kv_connector_stats={STATS_KEY: counts})
    take_stats(alone)
    assert alone.kv_connector_stats is None, "vLLM's loggers ask a connector if not"
    assert take_stats(None) is None


def test_reports_travel_with_an_output_sync_or_async() -> None:
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

    report = WorkerReport(VocabularyState(0.97, True), {"a": True})
    plain = ModelRunnerOutput(["a"], {"a": 0}, [[1, 2]])
    reported = with_report(plain, report)
    assert isinstance(reported, ModelRunnerOutput)
    assert reported.sampled_token_ids == [[1, 2]]
    assert report_of(reported) == report

    class Later(AsyncModelRunnerOutput):
        def get_output(self) -> ModelRunnerOutput:
            return plain

    later = with_report(Later(), report)
    assert isinstance(later, AsyncModelRunnerOutput)
    assert report_of(later.get_output()) == report
    assert with_report(plain, NOTHING) is plain
    assert with_report(None, report) is None
    assert report_of(plain) == NOTHING


def test_new_weights_end_what_the_alarm_is_used_to() -> None:
    metrics = StepMetrics(FixedController(K_MAX), K_MAX)
    for i in range(200):
        drafts = (RequestOutcome(f"{i}", 1, 1),)
        for _ in range(10):
            metrics.finished(StepOutcome(drafts, 1, 2, 0.1, num_decode_requests=1))
        metrics.ended(f"{i}", is_greedy=True)
    assert taken(metrics).levels["first_acceptance_baseline"] == 1.0
    metrics.new_weights({"target", "draft"})
    metrics._handed_over_at_s = 0.0
    assert "first_acceptance_baseline" not in taken(metrics).levels
