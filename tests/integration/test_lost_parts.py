"""What is lost on the way between scheduler and worker, or not compiled, is said."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker

from vllm_mtp.integration.scheduler import messages
from vllm_mtp.integration.scheduler.controlled_scheduler import ControlledScheduler
from vllm_mtp.integration.scheduler.drafting_failure import SurvivesFailure
from vllm_mtp.integration.scheduler.messages import (
    NOTHING,
    WorkerReport,
    directed,
    report_of,
    stop_rule_of,
    with_report,
)
from vllm_mtp.integration.v1 import draft_grammars
from vllm_mtp.integration.v1.draft_grammars import DraftGrammars
from vllm_mtp.integration.worker.reports import Reports
from vllm_mtp.integration.worker.worker import MTPPlusWorker
from vllm_mtp.metrics.stats import FAILED_DRAFTER
from vllm_mtp.records import StopRule

RULE = StopRule({}, (0.0, 1.0), 0.1)
CONFIG = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 64))


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []

    def warn(message: str, *values: Any) -> None:
        said.append(message % values)

    monkeypatch.setattr(messages.logger, "warning_once", warn)
    monkeypatch.setattr(draft_grammars.logger, "warning", warn)
    return said


def test_a_stop_rule_that_does_not_arrive_is_said(warnings: list[str]) -> None:
    step = SchedulerOutput.make_empty()
    assert stop_rule_of(step) is None
    step.num_spec_tokens_to_schedule = 2
    assert stop_rule_of(directed(step, None)) is None
    assert stop_rule_of(directed(step, RULE)) is RULE
    assert not warnings
    assert stop_rule_of(step) is None
    (said,) = warnings
    assert said.startswith("DirectedSchedulerOutput arrives as vLLM's plain Scheduler")


def test_reports_that_would_not_arrive_are_said_at_the_first_output(
    warnings: list[str],
) -> None:
    plain = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
    first = with_report(plain, NOTHING, is_first=True)
    assert report_of(first) == NOTHING
    for output, num_warnings in ((first, 0), (plain, 1)):
        scheduler = object.__new__(ControlledScheduler)
        scheduler._has_first_output, scheduler.metrics = False, None
        for _ in range(2):  # of the first output alone
            scheduler._take_report(output)
        assert len(warnings) == num_warnings
    assert warnings[0].startswith("ReportingOutput arrives as vLLM's plain Model")


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_grammar_that_cannot_be_compiled_is_said_once_with_its_cause(
    is_cached: bool, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Manager:
        def __init__(self, config: Any) -> None:
            """Compiles nothing."""

        def grammar_init(self, request: Any) -> None:
            failed: Future[Any] = Future()
            failed.set_exception(ValueError("no such rule"))
            request.structured_output_request.grammar = failed

        def _create_grammar(self, request: Any) -> Any:
            raise ValueError("no such rule")

    monkeypatch.setattr(draft_grammars, "StructuredOutputManager", Manager)
    grammars = DraftGrammars(CONFIG)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    for request_id in ("a", "b"):
        request = SimpleNamespace(req_id=request_id, sampling_params=params)
        if is_cached:
            key = draft_grammars.StructuredOutputRequest.from_sampling_params(params)
            assert key is not None
            grammars._cached[key.structured_output_key] = None
        grammars.meet([request], ())
        grammars.begin_pass([request_id])
        assert not grammars._rows
    (said,) = warnings
    assert "ValueError('no such rule')" in said


def test_what_is_said_once_is_not_lost_in_a_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU vLLM's worker makes steps of whose outputs no scheduler hears."""
    plain = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
    drafter = SurvivesFailure()
    drafter.mixes_draft_lengths = True
    drafter.has_failed, drafter._is_reported = True, False
    runner = Reports()

    def warm_up(worker: Any) -> None:
        runner.with_report(plain, drafter)

    monkeypatch.setattr(Worker, "compile_or_warm_up_model", warm_up)
    worker = object.__new__(MTPPlusWorker)
    worker.model_runner = runner
    worker.compile_or_warm_up_model()
    said = [report_of(runner.with_report(plain, drafter)) for _ in range(2)]
    assert said == [WorkerReport(None, {}, FAILED_DRAFTER, True), NOTHING]
