"""The fuzzer's options, its commands, and how ties are told from failures."""

import json
import shlex
from contextlib import contextmanager
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit.tools.fuzz_samples import answer, request
from vllm_mtp.cli.main import app
from vllm_mtp.tools.fuzz import (
    Failure,
    Findings,
    Prepared,
    Setting,
    compare_play,
)
from vllm_mtp.tools.fuzz_axes import AXES
from vllm_mtp.tools.fuzz_compare import Difference
from vllm_mtp.tools.fuzz_engines import Player
from vllm_mtp.tools.fuzz_reference import Reference
from vllm_mtp.tools.fuzz_run import command_of, parse_case, shares
from vllm_mtp.tools.fuzz_ties import sort_out_ties

SETTING = Setting("some/model", {"method": "mtp_plus"}, {}, 7)


class FakeEngine:
    """Answers from a table; dies of requests that are named so."""

    def __init__(self, table: dict[str, dict[str, Any]]) -> None:
        self.table = table
        self.asked: list[list[dict[str, Any]]] = []

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        requests = arguments["requests"]
        self.asked.append(requests)
        names = [each["name"] for each in requests]
        dies = any("deadly" in name for name in names)
        return {
            "answers": {n: self.table.get(n, answer([1])) for n in names},
            "died": "RuntimeError: x" if dies else "",
            "in_flight": names if dies else [],
        }


def player(engine: FakeEngine, max_starts: int = 9) -> Player:
    @contextmanager
    def start(name: str, arguments: Any) -> Any:
        yield engine

    return Player(start, "fake", {}, max_starts)


def test_the_reference_finds_out_of_which_request_it_dies() -> None:
    reference = Reference(player(FakeEngine({})))
    names = ["a", "b", "deadly", "c", "d"]
    reference.learn([request(name) for name in names])
    assert reference.died.keys() == {"deadly"}
    assert reference.answers.keys() == {"a", "b", "c", "d"}


def test_an_engine_is_not_started_again_and_again() -> None:
    reference = Reference(player(FakeEngine({}), max_starts=2))
    reference.learn([request(f"deadly {i}") for i in range(8)])
    assert reference.player.num_starts == 2


def failure(position: int | None) -> Failure:
    difference = Difference("token", 2, 5, 0, position)
    return Failure("sync", [request("r", logit_bias={"5": 1.0})], "r", difference)


@pytest.mark.parametrize(
    ("biased", "is_tie"), [([1, 5, 9], True), ([1, 2, 9], False), ([4, 5], False)]
)
def test_a_tie_is_what_the_reference_says_with_a_little_more_of_it(
    biased: list[int], is_tie: bool
) -> None:
    engine = FakeEngine({"r": answer([1, 2, 3]), "r-biased": answer(biased)})
    reference = Reference(player(engine))
    reference.learn([request("r")])
    findings = Findings(failures=[failure(1)])
    sort_out_ties(Prepared(SETTING, [], reference, reference), findings)
    assert bool(findings.ties) is is_tie
    assert bool(findings.failures) is not is_tie
    (asked,) = engine.asked[-1]
    assert asked["chunks"][0]["sampling"]["logit_bias"] == {"5": 1.001}


def test_only_tokens_can_be_ties() -> None:
    reference = Reference(player(FakeEngine({})))
    findings = Findings(failures=[failure(None)])
    sort_out_ties(Prepared(SETTING, [], reference, reference), findings)
    assert len(findings.failures) == 1


def test_a_play_is_compared_request_by_request() -> None:
    reference = Reference(player(FakeEngine({"a": answer([1, 2])})))
    play = [request("a"), request("b", trace_decode_token_ids=[1]), request("c")]
    reference.learn(play)
    played = {
        "answers": {"a": answer([1, 3]), "b": answer([9]), "c": answer([1])},
        "died": "",
        "in_flight": [],
    }
    findings = Findings()
    compare_play(reference, "sync", play, played, findings)
    assert [each.name for each in findings.failures] == ["a"]
    assert (findings.num_requests, findings.num_compared) == (3, 2)
    assert sum(findings.excluded.values()) == 1


def test_an_engine_that_dies_is_a_failure() -> None:
    play = [request("a")]
    reference = Reference(player(FakeEngine({})))
    reference.learn(play)
    played = {"answers": {"a": answer([])}, "died": "boom", "in_flight": ["a"]}
    findings = Findings()
    compare_play(reference, "sync", play, played, findings)
    (found,) = findings.failures
    assert found.difference.what == "engine died"
    assert not findings.num_compared


def test_the_printed_command_repeats_the_play() -> None:
    words = shlex.split(command_of(SETTING, failure(1)))
    assert words[:3] == ["vllm-mtp", "verify", "some/model"]
    assert words[words.index("--seed") + 1] == "7"
    axis, play = parse_case(words[words.index("--request") + 1])
    assert (axis, play) == ("sync", failure(1).play)


def test_every_axis_gets_plays() -> None:
    plays = [[request(str(i))] for i in range(25)]
    parts = shares(plays, None)
    assert parts.keys() == AXES.keys()
    assert sorted(r["name"] for p in parts.values() for q in p for r in q) == sorted(
        str(i) for i in range(25)
    )
    assert all(shares(plays[:1], None).values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "0"], "requests: 0 is not allowed"),
        (["--requests", "5", "--without", "nonsense"], "without: 'nonsense'"),
        (["--requests", "5", "--engines", "nonsense"], "engines: 'nonsense'"),
        (["--request", "{}"], "request: '{}' is not allowed"),
        (["--request", "[1"], "request: '[1' is not allowed"),
        (
            ["--request", json.dumps({"engine": "sync", "requests": []})],
            "is not allowed; must be a JSON object with `engine`",
        ),
        (["--requests", "5", "--output", "/no/such/folder/x"], "output:"),
        (
            ["--requests", "5", "--speculative-config", '{"method": "mtp"}'],
            "speculative-config:",
        ),
        (["--requests", "5", "--engine-args", "[]"], "engine-args: '[]'"),
    ],
)
def test_wrong_input_is_one_sentence(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["verify", "owner/name", *arguments])
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output
