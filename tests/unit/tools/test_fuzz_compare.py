"""What counts as a difference between two answers."""

import math
from typing import Any

import pytest

from tests.unit.tools.fuzz_samples import answer, request
from vllm_mtp.tools.fuzz_compare import (
    LATE_SEED,
    SAMPLED_PIN,
    TRACE,
    compare,
    compare_logprobs,
    exclusion,
)

RIGHT = answer([1, 2, 3, 4])
ROWS = [{5: (-0.5, 1), 6: (-1.5, 2)}, {7: (-0.1, 1), 8: (-3.0, 2)}]


def test_equal_answers_do_not_differ() -> None:
    assert compare(RIGHT, answer([1, 2, 3, 4])) is None


def test_the_first_other_token_is_found() -> None:
    found = compare(RIGHT, answer([1, 2, 5, 6]))
    assert found is not None
    assert (found.what, found.position) == ("token", 2)
    assert (found.expected, found.found) == (3, 5)


@pytest.mark.parametrize(
    ("ours", "what"),
    [
        (answer([1, 2, 3]), "number of tokens"),
        (answer([1, 2, 3, 4, 5]), "number of tokens"),
        (answer([1, 2, 3, 4], ends=[("stop", 4, 4)]), "end"),
        (answer([1, 2, 3, 4], text="bcd"), "text"),
        (answer([1, 2, 3, 4], logprobs=[]), None),
        (answer([1, 2, 3, 4], logprobs=ROWS), "logprobs"),
        (answer([1, 2, 3, 4], num_prompt_tokens=5), "number of prompt tokens"),
        (answer([1, 2, 3, 4], outputs={}), "number of outputs"),
        (answer([1, 2, 3, 4], refused="ValueError: no"), "refusal"),
        (answer([1, 2, 3, 4], problems=["taken back"]), "stream"),
        (answer([1, 2, 3, 4], prompt_logprobs=[None, ROWS[0]]), "prompt logprobs"),
        (
            answer([1, 2, 3, 4], prompt_token_id_logprobs=[[-1.0]]),
            "prompt_logprob_token_ids",
        ),
    ],
)
def test_everything_else_of_an_answer_is_compared(
    ours: dict[str, Any], what: str | None
) -> None:
    found = compare(RIGHT, ours)
    assert (found and found.what) == what


def test_of_an_aborted_request_the_beginning_is_compared() -> None:
    part = {"was_aborted": True, "ends": []}
    assert compare(RIGHT, answer([1, 2], **part)) is None
    assert compare(RIGHT, answer([], **part)) is None
    # Text is held back for stop strings.
    assert compare(RIGHT, answer([1, 2, 3], text="b", **part)) is None
    for wrong in (answer([1, 3], **part), answer([1, 2], text="x", **part)):
        assert compare(RIGHT, wrong) is not None


def test_both_refusing_is_alike() -> None:
    assert compare(answer([], refused="a"), answer([], refused="b")) is None


def test_values_may_differ_by_rounding_and_no_more() -> None:
    near = [{5: (-0.5004, 1), 6: (-1.5, 2)}, ROWS[1]]
    far = [{5: (-0.6, 1), 6: (-1.5, 2)}, ROWS[1]]
    assert compare_logprobs(ROWS, near) == ""
    assert "token 5 has -0.6" in compare_logprobs(ROWS, far)
    assert compare_logprobs(ROWS, ROWS[:1]) == "1 positions, not 2"
    assert "has rank 4" in compare_logprobs([{5: (-0.5, 1)}], [{5: (-0.5, 4)}])


def test_another_token_among_the_likeliest_must_be_as_likely() -> None:
    right = [{5: (-0.5, 1), 6: (-1.5, 2)}]
    assert compare_logprobs(right, [{5: (-0.5, 1), 9: (-1.5001, 2)}]) == ""
    assert compare_logprobs(right, [{5: (-0.5, 1), 9: (-1.7, 2)}]) != ""


def test_the_chosen_token_is_among_its_entries() -> None:
    assert compare_logprobs(ROWS, ROWS, [5, 8]) == ""
    assert "chosen token 9" in compare_logprobs(ROWS, ROWS, [5, 9])


def test_where_no_token_is_allowed_both_have_none() -> None:
    rows = [{5: (math.nan, 9)}]
    assert compare_logprobs(rows, [{5: (math.nan, 4)}]) == ""
    assert compare_logprobs(rows, [{5: (math.nan, 4), 6: (math.nan, 1)}]) == ""
    assert compare_logprobs([{5: (-3.0, 9)}], rows) != ""
    assert compare_logprobs(rows, [{5: (-3.0, 9)}]) != ""


def test_minus_infinity_equals_itself() -> None:
    rows = [{5: (-math.inf, 9)}]
    assert compare_logprobs(rows, rows) == ""
    assert compare_logprobs([{5: (-3.0, 9)}], rows) != ""
    assert compare_logprobs(rows, [{5: (-math.inf, 4)}]) == "", "in any order"


SEEDED = {"temperature": 1.0, "seed": 1}


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({}, None),
        ({"extra_args": {"mtp_plus": {"k": 3}}}, None),
        (SEEDED, None),
        (SEEDED | {"extra_args": {"mtp_plus": {"k": 3}}}, SAMPLED_PIN),
        (SEEDED | {"extra_args": {"mtp_plus_k": 0}}, None),
        ({"trace_decode_token_ids": [1]}, TRACE),
    ],
)
def test_only_named_reasons_keep_an_answer_from_being_compared(
    sampling: dict[str, Any], reason: str | None
) -> None:
    assert exclusion(request("r", **sampling)) == reason


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ([SEEDED, SEEDED], None),
        ([SEEDED, {"temperature": 0.0}], None),
        ([{"temperature": 0.0}, SEEDED], LATE_SEED),
        ([SEEDED, {"temperature": 0.0}, SEEDED], LATE_SEED),
    ],
)
def test_a_session_has_one_text_while_vllm_seeds_it(
    inputs: list[dict[str, Any]], reason: str | None
) -> None:
    session = request("r") | {
        "session": True,
        "chunks": [{"prompt": [1], "sampling": sampling} for sampling in inputs],
    }
    assert exclusion(session) == reason
