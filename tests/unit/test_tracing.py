"""Traces: every call is written down, and the wrapped controller never notices."""

import json
import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vllm_mtp.config import ConfigError
from vllm_mtp.control.controller import Controller
from vllm_mtp.control.fixed import FixedController
from vllm_mtp.control.goodput import GoodputController
from vllm_mtp.control.randomized import RandomController
from vllm_mtp.integration.observe.tracing import TracingController
from vllm_mtp.records import DecodeRequest, RequestOutcome, StepOutcome

K_MAX = 4
REQUESTS = [
    DecodeRequest("cmpl-secret-a", 100),
    DecodeRequest("cmpl-secret-b", 200, False, 2, is_constrained=True),
]


def outcome(*requests: tuple[str, int, int], seconds: float = 0.01) -> StepOutcome:
    return StepOutcome(
        requests=tuple(RequestOutcome(*request) for request in requests),
        num_requests=len(REQUESTS),
        num_scheduled_tokens=7,
        step_time_s=seconds,
        draft_depth=3,
        num_decode_requests=2,
        num_prefill_tokens=5,
        num_context_tokens=300,
        num_backfill_tokens=1,
        is_greedy=False,
        shadow_drafts=(RequestOutcome("cmpl-secret-b", 1, 0),),
    )


def traced(path: Path, controller: Controller | None = None) -> TracingController:
    wrapped = controller or RandomController(K_MAX, 0)
    return TracingController(wrapped, path, {"model": "m"}, K_MAX)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_first_line_says_what_the_file_is_and_where_it_comes_from(
    tmp_path: Path,
) -> None:
    traced(tmp_path / "t.jsonl")
    (header,) = lines(tmp_path / "t.jsonl")
    assert header["format"] == "vllm-mtp trace"
    assert header["version"] == 2
    assert header["max_draft_length"] == K_MAX
    assert header["provenance"] == {"model": "m"}


def test_a_traced_controller_decides_as_the_wrapped_one(tmp_path: Path) -> None:
    plain, wrapped = GoodputController(K_MAX), GoodputController(K_MAX)
    controller = traced(tmp_path / "t.jsonl", wrapped)
    depths = set()
    for step in range(200):
        assert controller.may_draft() == plain.may_draft()
        decision = controller.decide(REQUESTS)
        assert decision == plain.decide(REQUESTS)
        depths.add(decision.draft_depth)
        drafted = decision.num_draft_tokens["cmpl-secret-a"]
        seen = outcome(("cmpl-secret-a", drafted, min(drafted, step % 3)))
        controller.observe(seen)
        plain.observe(seen)
    assert len(depths) > 1


def test_every_call_is_written_in_order(tmp_path: Path) -> None:
    controller = traced(tmp_path / "t.jsonl", FixedController(3))
    controller.decide(REQUESTS)
    controller.decide(REQUESTS[:1])  # async scheduling: outcomes arrive later
    controller.observe(outcome(("cmpl-secret-a", 3, 1), ("cmpl-secret-b", 2, 2)))
    _, first, second, observed = lines(tmp_path / "t.jsonl")
    assert first == {
        "decision": 0,
        "depth": 3,
        "reason": "fixed",
        "requests": [[0, 100, 1, None, 3, None, 0], [1, 200, 0, 2, 2, None, 1]],
        "survival": [],
    }
    assert second["decision"] == 1
    assert second["requests"] == [[0, 100, 1, None, 3, None, 0]]
    assert observed == {
        "outcome": 0,
        "step_time_s": 0.01,
        "num_requests": 2,
        "num_scheduled_tokens": 7,
        "draft_depth": 3,
        "num_decode_requests": 2,
        "num_prefill_tokens": 5,
        "num_context_tokens": 300,
        "num_backfill_tokens": 1,
        "is_greedy": False,
        "requests": [[0, 3, 1], [1, 2, 2]],
        "shadow_drafts": [[1, 1, 0]],
    }
    assert "secret" not in (tmp_path / "t.jsonl").read_text()


def test_survival_estimates_are_written_once_for_requests_that_share_them(
    tmp_path: Path,
) -> None:
    wrapped = GoodputController(K_MAX)
    controller = traced(tmp_path / "t.jsonl", wrapped)
    alike = [DecodeRequest("a", 100), DecodeRequest("b", 100)]
    other = DecodeRequest("c", 9000, False)
    controller.decide([*alike, other])
    line = lines(tmp_path / "t.jsonl")[1]
    indices = [row[5] for row in line["requests"]]
    assert indices == [0, 0, 1]
    for index, request in ((0, alike[0]), (1, other)):
        assert line["survival"][index] == pytest.approx(
            wrapped.survival.survival_of_class(
                wrapped.survival.class_of[request.request_id]
            ),
            abs=5e-4,
        )


def test_a_running_request_keeps_its_number_while_thousands_come_and_go(
    tmp_path: Path,
) -> None:
    controller = traced(tmp_path / "t.jsonl", FixedController(1))
    for i in range(300):
        others = [DecodeRequest(f"{i}-{j}", 8) for j in range(60)]
        controller.decide([REQUESTS[0], *others])
    numbers = [line["requests"][0][0] for line in lines(tmp_path / "t.jsonl")[1:]]
    assert numbers == [0] * 300


@pytest.mark.parametrize(
    ("name", "reason"),
    [("nowhere/t.jsonl", "there is no folder"), ("file/t.jsonl", "cannot be created")],
)
def test_a_path_that_cannot_be_created_is_refused_at_once(
    tmp_path: Path, name: str, reason: str
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=reason) as caught:
        traced(tmp_path / name)
    assert str(caught.value).startswith("speculative_config.trace_path='")


def test_a_trace_that_exists_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("hours of recording")
    with pytest.raises(ConfigError, match="exists already"):
        traced(path)
    assert path.read_text() == "hours of recording"


@contextmanager
def files_limited_to(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_when_the_disk_is_full_the_trace_ends_and_serving_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.jsonl"
    controller = traced(path, FixedController(2))
    with caplog.at_level(logging.WARNING), files_limited_to(2000):
        for _ in range(100):
            assert controller.decide(REQUESTS).draft_depth == 2
            controller.observe(outcome())
    assert path.stat().st_size <= 2000
    (warning,) = [record.getMessage() for record in caplog.records]
    assert str(path) in warning


def test_after_closing_nothing_is_written_and_decisions_go_on(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    controller = traced(path, FixedController(2))
    controller.close()
    assert controller.decide(REQUESTS).draft_depth == 2
    controller.observe(outcome())
    controller.close()
    assert len(lines(path)) == 1
