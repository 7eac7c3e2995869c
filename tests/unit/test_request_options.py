"""What a request may say about its own drafts."""

from typing import Any

import pytest

from vllm_mtp.config import ConfigError
from vllm_mtp.request_options import is_recorded, pinned_draft_length


@pytest.mark.parametrize(
    "extra_args",
    [
        None,
        {},
        {"other": 1},
        {"mtp_plus": {}},
        {"mtp_plus": {"k": "auto"}},
        {"mtp_plus_k": "auto"},
    ],
)
def test_without_a_number_the_controller_decides(extra_args: Any) -> None:
    assert pinned_draft_length(extra_args, 8) is None


@pytest.mark.parametrize("k", [0, 1, 8])
def test_both_spellings_fix_the_draft_length(k: int) -> None:
    assert pinned_draft_length({"mtp_plus": {"k": k}}, 8) == k
    assert pinned_draft_length({"mtp_plus_k": k, "other": "x"}, 8) == k
    assert pinned_draft_length({"mtp_plus_k": k, "mtp_plus": {"k": k}}, 8) == k


@pytest.mark.parametrize("k", [-1, 9, 1.0, True, "3", None, [1]])
def test_anything_else_is_refused_with_what_is_allowed(k: Any) -> None:
    for extra_args, key in (
        ({"mtp_plus_k": k}, "mtp_plus_k"),
        ({"mtp_plus": {"k": k}}, "mtp_plus.k"),
    ):
        with pytest.raises(ConfigError) as error:
            pinned_draft_length(extra_args, 8)
        assert str(error.value) == (
            f"{key}={k!r} is not allowed: must be 'auto' or an integer from 0 to 8, "
            "the server's num_speculative_tokens."
        )


def test_contradictions_and_unknown_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"mtp_plus_k=1 contradicts mtp_plus\.k=2"):
        pinned_draft_length({"mtp_plus_k": 1, "mtp_plus": {"k": 2}}, 8)
    for options in ({"depth": 1}, 3, "k"):
        with pytest.raises(ConfigError, match="no keys but 'k' and 'record'"):
            pinned_draft_length({"mtp_plus": options}, 8)


@pytest.mark.parametrize(
    ("extra_args", "is_wanted"),
    [
        (None, True),
        ({}, True),
        ({"mtp_plus_k": 3}, True),
        ({"mtp_plus": {"k": 3}}, True),
        ({"mtp_plus_record": 1}, True),
        ({"mtp_plus_record": True}, True),
        ({"mtp_plus_record": 0}, False),
        ({"mtp_plus": {"record": False}}, False),
        ({"mtp_plus_record": 1, "mtp_plus": {"record": 0}}, False),
    ],
)
def test_a_request_may_refuse_to_be_recorded(extra_args: Any, is_wanted: bool) -> None:
    assert is_recorded(extra_args) is is_wanted
    assert pinned_draft_length(extra_args, 8) in (None, 3)


@pytest.mark.parametrize("value", [2, -1, "no", None, [0]])
def test_other_answers_are_refused(value: Any) -> None:
    for extra_args, key in (
        ({"mtp_plus_record": value}, "mtp_plus_record"),
        ({"mtp_plus": {"record": value}}, "mtp_plus.record"),
    ):
        with pytest.raises(ConfigError) as error:
            is_recorded(extra_args)
        assert str(error.value) == (
            f"{key}={value!r} is not allowed: must be 0 or 1, true or false."
        )
