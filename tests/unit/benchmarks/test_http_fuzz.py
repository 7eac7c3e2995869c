"""Random HTTP requests: made from a seed, held to one answer, shrunk."""

import re
from dataclasses import replace

import pytest

from benchmarks.http_fuzz.bench import HttpFuzzOptions, verdict
from benchmarks.http_fuzz.client import Answer, Choice, _collect
from benchmarks.http_fuzz.compare import differences
from benchmarks.http_fuzz.options import BAD_CHAT, BAD_COMPLETION
from benchmarks.http_fuzz.requests import (
    CHAT,
    COMPLETIONS,
    RAW,
    FuzzRequest,
    Seedling,
    is_determined,
    make_requests,
)
from benchmarks.http_fuzz.shrink import candidates, shrink
from vllm_mtp.config import ConfigError

SEEDLINGS = [
    Seedling(COMPLETIONS, "def f(", (4, 5, 6), (7, 8, 9), ("x", "):", "\n")),
    Seedling(CHAT, [{"role": "user", "content": "hi"}], (1, 2), (3, 4), ("a", " b")),
]
FOREIGN_IDS = (11, 12, 13)
TOLERANCE = 1e-3


def some_requests(seed: int, **options) -> list[FuzzRequest]:
    return make_requests(SEEDLINGS, FOREIGN_IDS, 400, seed, **options)


def test_the_same_seed_makes_the_same_requests() -> None:
    assert some_requests(3) == some_requests(3)
    assert some_requests(3) != some_requests(4)


def test_every_good_request_has_one_right_answer() -> None:
    for request in some_requests(0):
        is_refused = any(
            bad.items() <= request.body.items() for bad in (*BAD_CHAT, *BAD_COMPLETION)
        )
        if request.raw_body is None and not is_refused:
            assert is_determined(request.body), request.body


def test_all_kinds_of_requests_are_made() -> None:
    kinds = {kind for request in some_requests(0) for kind in request.kinds}
    for wanted in (
        "completions.echo",
        "completions.n",
        "completions.prompt_list",
        "completions.disconnect",
        "completions.logit_bias",
        "completions.vllm_xargs",
        "completions.bad_words",
        "completions.logprob_token_ids",
        "completions.thinking_token_budget",
        "chat.tools",
        "chat.chat_template_kwargs",
        "chat.structured_outputs",
        "chat.response_format",
        "chat.stream_options",
    ):
        assert wanted in kinds, sorted(kinds)


def test_a_skipped_option_is_left_out_and_nothing_else_changes() -> None:
    for with_all, without in zip(
        some_requests(0), some_requests(0, skipped=("logprobs",)), strict=True
    ):
        body = {k: v for k, v in with_all.body.items() if k != "logprobs"}
        assert replace(with_all, body=body) == without


def test_a_failing_request_is_shrunk_to_what_makes_it_fail() -> None:
    body = {
        "model": "demo",
        "prompt": [5, 6, 7, 8, 9, 10],
        "temperature": 0.8,
        "seed": 4,
        "max_tokens": 24,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logit_bias": {"3": 1.0, "4": 2.0},
        "stop": ["a", "b"],
    }
    request = FuzzRequest(0, COMPLETIONS, body, "openai", closes_after=3)

    def fails(tried: FuzzRequest) -> bool:
        return "4" in tried.body.get("logit_bias", {}) and 8 in tried.body["prompt"]

    shrunk, num_trials = shrink(request, fails)
    assert shrunk.body == {
        "model": "demo",
        "prompt": [8],
        "logit_bias": {"4": 2.0},
        "temperature": 0,
    }
    assert (shrunk.through, shrunk.closes_after) == (RAW, None)
    assert num_trials < 60
    assert '-d \'{"model"' in shrunk.as_curl()


def test_smaller_requests_have_one_right_answer_too() -> None:
    for request in some_requests(5)[:60]:
        for smaller in candidates(request):
            assert is_determined(smaller.body)


def an_answer(**fields) -> Answer:
    top = {"x": -0.5, "y": -1.0}
    logprobs = [{"token": "x", "logprob": -0.5, "top": top}]
    known = {
        "text": "x",
        "token_ids": [7],
        "logprobs": logprobs,
        "finish_reason": "stop",
    }
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    return Answer(choices={0: Choice(**(known | fields))}, usage=usage)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"text": "y"}, "text 'y' instead of 'x'"),
        ({"token_ids": [8]}, "token_ids"),
        ({"finish_reason": "length"}, "finish_reason"),
        ({"stop_reason": 4}, "stop_reason"),
        ({"tool_calls": [{"name": "f", "arguments": ""}]}, "tool_calls"),
        ({"reasoning": "so"}, "reasoning"),
        ({"logprobs": []}, "logprobs of 0 tokens instead of 1"),
        (
            {"logprobs": [{"token": "x", "logprob": -0.7, "top": {}}]},
            r"logprobs\[0\]: -0.7",
        ),
    ],
)
def test_a_different_answer_is_noticed(fields, words) -> None:
    (found,) = differences(an_answer(), an_answer(**fields), TOLERANCE)
    assert re.search(words, found)


def test_an_equal_answer_passes_and_so_do_logprobs_that_rounding_changed() -> None:
    top = {"x": -0.5001, "y": -1.0}
    near = [{"token": "x", "logprob": -0.5001, "top": top}]
    assert differences(an_answer(), an_answer(), TOLERANCE) == []
    assert differences(an_answer(), an_answer(logprobs=near), TOLERANCE) == []


def test_a_client_that_went_away_heard_the_beginning() -> None:
    whole, cut = an_answer(text="abc"), an_answer(text="ab")
    wrong = an_answer(text="b")
    cut.is_cut = wrong.is_cut = True
    assert differences(whole, cut, TOLERANCE) == []
    assert differences(whole, wrong, TOLERANCE)


def test_a_refusal_must_be_a_refusal() -> None:
    refused = Answer(status=400, error="no")
    assert differences(refused, refused, TOLERANCE) == []
    assert "status 200 instead of 400" in differences(refused, Answer(), TOLERANCE)[0]


def test_a_stream_adds_up_to_the_answer_at_once() -> None:
    def collected(events, **body) -> Answer:
        answer = Answer()
        _collect(iter(events), FuzzRequest(0, CHAT, body), answer)
        return answer

    def chunk(delta, **rest):
        return {"choices": [{"index": 0, "delta": delta} | rest]}

    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    whole = collected(
        [
            {
                "choices": [
                    {
                        "index": 0,
                        "message": {"content": "猫😀", "tool_calls": [call]},
                        "token_ids": [4, 5],
                        "finish_reason": "stop",
                    }
                ]
            }
        ]
    )
    parts = [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "猫"}, token_ids=[4]),
        chunk({"tool_calls": [{"index": 0, "function": {"name": "f"}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}),
        chunk({"content": "😀"}, token_ids=[5], finish_reason="stop"),
    ]
    streamed = collected(parts, stream=True)
    assert differences(whole, streamed, TOLERANCE) == []
    assert not streamed.faults
    assert collected(parts[:-1], stream=True).faults


def test_wrong_options_are_refused(tmp_path) -> None:
    for wrong in (
        {"num_requests": 0},
        {"seed": -1},
        {"dtype": "int3"},
        {"speculative_config": {"method": "mtp"}},
        {"output": tmp_path / "missing" / "report.json"},
    ):
        with pytest.raises(ConfigError):
            HttpFuzzOptions(**wrong)


def test_the_verdict_says_what_was_not_shown() -> None:
    report = {
        "is_exact": False,
        "findings": [],
        "ties": [],
        "held": {"mtp_plus": []},
        "options": {"num_requests": 5},
    }
    assert verdict(report).startswith("NOT SHOWN")
    assert verdict(report | {"is_exact": True}).startswith("Exact")
    assert verdict(report | {"held": {"mtp_plus": ["x"]}}).startswith("NOT FREED")
    found = [{"num_requests": 2}]
    assert "2 of 5 answers differ" in verdict(report | {"findings": found})
