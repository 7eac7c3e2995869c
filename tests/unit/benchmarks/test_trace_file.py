"""Reading traces back: exactly what was written, or one sentence about why not."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.control.trace_file import read_trace
from vllm_mtp.config import ConfigError
from vllm_mtp.control.goodput import GoodputController
from vllm_mtp.integration.observe.tracing import TracingController
from vllm_mtp.records import DecodeRequest, RequestOutcome, StepOutcome

OUTCOME = StepOutcome(
    requests=(RequestOutcome("0", 3, 1), RequestOutcome("1", 2, 2)),
    num_requests=2,
    num_scheduled_tokens=7,
    step_time_s=0.0123456,
    draft_depth=3,
    num_decode_requests=2,
    num_context_tokens=300,
    num_backfill_tokens=4,
    is_greedy=False,
)
REQUESTS = (
    DecodeRequest("0", 100),
    DecodeRequest("1", 200, False, 2, is_constrained=True),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A trace of two decisions, then one outcome."""
    path = tmp_path / "t.jsonl"
    controller = TracingController(GoodputController(4), path, {"model": "m"}, 4)
    for _ in range(2):
        controller.decide(REQUESTS)
    controller.observe(OUTCOME)
    controller.close()
    return path


def test_what_was_written_is_read_back(path: Path) -> None:
    trace = read_trace(path)
    assert trace.max_draft_length == 4
    assert trace.provenance == {"model": "m"}
    assert not trace.is_cut_off
    fresh = GoodputController(4)
    for traced in trace.decisions:
        assert traced.decision == fresh.decide(REQUESTS)
        assert traced.requests == REQUESTS
        assert traced.survival["1"] == pytest.approx(
            fresh.survival.survival_of_class(fresh.survival.see(REQUESTS[1])), abs=5e-4
        )
    assert [tuple(traced) for traced in trace.outcomes] == [(OUTCOME, 2)]


def test_the_first_traces_did_not_say_who_was_constrained(path: Path) -> None:
    header, *lines = path.read_text().splitlines()
    older = [json.loads(line) for line in lines]
    for line in older:
        if "decision" in line:
            line["requests"] = [row[:6] for row in line["requests"]]
    path.write_text("\n".join([header, *map(json.dumps, older)]) + "\n")
    expected = tuple(r._replace(is_constrained=False) for r in REQUESTS)
    assert [t.requests for t in read_trace(path).decisions] == [expected] * 2


def test_the_last_line_of_a_killed_server_is_left_out(path: Path) -> None:
    path.write_text(path.read_text()[:-20])
    trace = read_trace(path)
    assert trace.is_cut_off
    assert len(trace.decisions) == 2
    assert trace.outcomes == ()


def changed_outcome(path: Path, **changes: Any) -> None:
    *before, last = path.read_text().splitlines()
    lines = [*before, json.dumps(json.loads(last) | changes)]
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    "changes",
    [
        {"step_time_s": -1.0},
        {"step_time_s": float("nan")},
        {"step_time_s": "soon"},
        {"num_context_tokens": 1.5},
        {"draft_depth": -1},
        {"requests": [[0, 3, 4]]},
        {"requests": [[0, 5, 1]]},
        {"requests": [[0, 3]]},
        {"requests": None},
    ],
)
def test_a_line_that_makes_no_sense_is_named(
    path: Path, changes: dict[str, Any]
) -> None:
    changed_outcome(path, **changes)
    with pytest.raises(ConfigError, match=r"t\.jsonl': line 4 "):
        read_trace(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no trace"),
        (b"hello\n", "no trace"),
        (b'{"some": "json"}\n', "no trace"),
        (b"[1]\n", "no trace"),
        (b"\xff\xfe\x00", "no text file"),
        (b'{"format": "vllm-mtp trace", "version": 3}\n', "reads version 2"),
        (
            b'{"format": "vllm-mtp trace", "version": 2, "max_draft_length": 99}\n',
            "from 1 to 16",
        ),
    ],
)
def test_a_foreign_file_is_refused_in_a_sentence(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_trace(tmp_path / "missing")
