"""Whatever a file or an option holds: a sentence of ours, never a traceback."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.__main__ import app as benchmarks
from benchmarks.control.trace_file import read_trace
from vllm_mtp.cli.arguments import parse_object
from vllm_mtp.cli.main import app
from vllm_mtp.config import (
    METHOD,
    ConfigError,
    MTPPlusConfig,
)
from vllm_mtp.drafting.vocabulary_list import read_vocabulary_list
from vllm_mtp.request_options import pinned_draft_length
from vllm_mtp.split_options import (
    split_options,
)
from vllm_mtp.tools.prompts import load_prompts
from vllm_mtp.tools.report import make_report

quickly = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([1e308, -1, 2**70, METHOD, "auto", "full", "\x00"])
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=10,
)
NESTED = "[" * 20_000


def spoil(valid: Any, data: st.DataObject) -> Any:
    """The same JSON with one value, anywhere, exchanged or gone."""
    spoilt = json.loads(json.dumps(valid))
    place = spoilt
    while isinstance(place, dict | list) and place:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        inner = place[key]
        if isinstance(inner, dict | list) and inner and data.draw(st.booleans()):
            place = inner
            continue
        if data.draw(st.booleans()):
            place[key] = data.draw(values)
        elif isinstance(place, dict):
            del place[key]
        else:
            place.pop(key)
        break
    return spoilt


def assert_read_or_refused(read: Callable[..., Any], *args: Any) -> None:
    try:
        read(*args)
    except ConfigError as error:
        sentence = str(error)
    else:
        return
    assert sentence
    assert "Traceback" not in sentence


VOCABULARY = {
    "format": "vllm-mtp draft vocabulary 1",
    "vocab_size": 100,
    "tokenizer_sha256": "x",
    "token_ids": [5, 7, 1],
    "counts": [9, 3, 0],
    "num_counted": 20,
    "source": {"command": []},
}
TRACE_HEADER = {
    "format": "vllm-mtp trace",
    "version": 2,
    "max_draft_length": 4,
    "provenance": {},
}


@quickly
@given(st.data())
def test_a_spoilt_vocabulary_list(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "list.json"
    path.write_text(json.dumps(spoil(VOCABULARY, data)), encoding="utf-8")
    assert_read_or_refused(read_vocabulary_list, path)


@pytest.fixture
def trace_lines(tmp_path: Path) -> list[Any]:
    """Of a trace that our controller wrote."""
    from vllm_mtp.control.fixed import FixedController
    from vllm_mtp.integration.observe.tracing import TracingController
    from vllm_mtp.records import DecodeRequest, RequestOutcome, StepOutcome

    path = tmp_path / "written.jsonl"
    controller = TracingController(FixedController(2), path, {}, 4)
    controller.decide([DecodeRequest("a", 10, True, None, 0, False)])
    controller.observe(
        StepOutcome(
            requests=(RequestOutcome("a", 2, 1),),
            num_requests=1,
            num_scheduled_tokens=3,
            step_time_s=0.01,
            draft_depth=2,
            num_decode_requests=1,
            num_context_tokens=10,
        )
    )
    controller.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


@quickly
@given(st.data())
def test_a_spoilt_trace(
    tmp_path: Path, trace_lines: list[Any], data: st.DataObject
) -> None:
    path = tmp_path / "trace.jsonl"
    lines = list(trace_lines)
    number = data.draw(st.integers(0, len(lines) - 1))
    lines[number] = spoil(lines[number], data)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert_read_or_refused(read_trace, path)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines[: number + 1]))
    assert_read_or_refused(read_trace, path)


@pytest.mark.parametrize(
    "read",
    [
        read_vocabulary_list,
        read_trace,
        lambda path: make_report([path]),
        lambda path: load_prompts(path, "m", 10),
    ],
    ids=["vocabulary", "trace", "result", "prompts"],
)
class TestAnyFile:
    @quickly
    @given(content=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
    def test_of_bytes(
        self, tmp_path: Path, read: Callable[..., Any], content: bytes
    ) -> None:
        path = tmp_path / "file.json"
        path.write_bytes(content)
        assert_read_or_refused(read, path)

    @quickly
    @given(content=values)
    def test_of_json(
        self, tmp_path: Path, read: Callable[..., Any], content: Any
    ) -> None:
        path = tmp_path / "file.json"
        path.write_text(json.dumps(content) + "\n")
        assert_read_or_refused(read, path)

    @pytest.mark.parametrize("content", [NESTED, '{"a": ' * 20_000, "NaN", "1e999"])
    def test_that_is_hard_to_parse(
        self, tmp_path: Path, read: Callable[..., Any], content: str
    ) -> None:
        path = tmp_path / "file.json"
        path.write_text(content + "\n")
        assert_read_or_refused(read, path)


@quickly
@given(key=st.sampled_from(sorted(MTPPlusConfig.model_fields)), value=values)
def test_any_value_of_an_option(key: str, value: Any) -> None:
    assert_read_or_refused(split_options, {"method": METHOD, key: value}, ())


@quickly
@given(st.dictionaries(st.text(max_size=12), values, max_size=3))
def test_any_speculative_config(options: dict[str, Any]) -> None:
    assert_read_or_refused(split_options, options, ("model",))


@quickly
@given(
    st.dictionaries(st.sampled_from(["mtp_plus_k", "mtp_plus", "x"]), values)
    | st.fixed_dictionaries({"mtp_plus": st.fixed_dictionaries({"k": values})})
)
def test_any_wish_of_a_request(extra_args: dict[str, Any]) -> None:
    assert_read_or_refused(pinned_draft_length, extra_args, 8)


@quickly
@given(st.text(max_size=40) | values.map(json.dumps))
def test_any_object_on_the_command_line(text: str) -> None:
    assert_read_or_refused(parse_object, "engine-args", text)


def test_a_deep_object_on_the_command_line() -> None:
    assert_read_or_refused(parse_object, "engine-args", NESTED)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{}", b"[]", b"", NESTED.encode()])
@pytest.mark.parametrize(
    "command",
    [
        ("report", "{file}", "--output", "{folder}/report.md"),
        ("verify", "m/m", "--prompts", "{file}"),
        ("verify", "m/m", "--engine-args", "{{"),
    ],
    ids=" ".join,
)
def test_a_command_ends_with_code_2(
    tmp_path: Path, command: tuple[str, ...], content: bytes
) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(content)
    arguments = [part.format(file=file, folder=tmp_path) for part in command]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    assert "Traceback" not in result.output


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{}", b"[]", b"", NESTED.encode()])
@pytest.mark.parametrize(
    "command",
    [
        ("trace", "replay", "--trace"),
        ("report",),
        ("http-fuzz", "--requests", "0", "--output"),
        ("http-fuzz", "--seed", "-1", "--output"),
        ("soak", "--minutes", "nan", "--output"),
        ("soak", "--speculative-config", '{"method": "mtp"}', "--output"),
    ],
    ids=" ".join,
)
def test_a_benchmark_ends_with_code_2(
    tmp_path: Path, command: tuple[str, ...], content: bytes
) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(content)
    result = CliRunner().invoke(benchmarks, [*command, str(file)])
    assert result.exit_code == 2, (result.output, result.exception)
    assert "error: " in result.stderr
