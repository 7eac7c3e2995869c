"""What is held against a sampled request without a seed."""

from random import Random
from typing import Any

import pytest

from tests.unit.tools.fuzz_samples import answer, request
from vllm_mtp.tools.fuzz_unseeded import check_alone, drop_seed, is_unseeded

RIGHT = answer([1])


def unseeded(**sampling: Any) -> dict[str, Any]:
    return request("r", temperature=0.8, **sampling)


def test_only_sampled_requests_without_a_seed_are_unseeded() -> None:
    assert is_unseeded(unseeded())
    assert not is_unseeded(unseeded(seed=0))
    assert not is_unseeded(request("r"))
    for each in (request("r"), unseeded(seed=4)):
        assert is_unseeded(drop_seed(each, Random(0)))


def ends(reason: str, stop_reason: Any, count: int) -> list[tuple[Any, ...]]:
    return [(reason, stop_reason, count)]


@pytest.mark.parametrize(
    ("sampling", "found"),
    [
        ({"max_tokens": 2}, answer([1, 2, 3])),
        ({"allowed_token_ids": [1, 2]}, answer([1, 3])),
        ({"stop_token_ids": [5]}, answer([1, 5, 2])),
        ({"stop_token_ids": [5], "min_tokens": 3}, answer([1, 5, 2, 5])),
        ({"stop_token_ids": [5]}, answer([1, 2], ends=ends("stop", 5, 2))),
        ({"min_tokens": 4}, answer([1, 2], ends=ends("stop", None, 2))),
        ({"n": 2}, answer([1, 2])),
        ({"logprobs": 1}, answer([1, 2])),
        ({"logprobs": 1}, answer([1], logprobs=[{2: (-0.1, 1)}])),
        ({"logprobs": 1}, answer([1, 2], logprobs=[{1: (-0.1, 1)}])),
        ({}, answer([1], ends=ends("abort", None, 1))),
        ({}, answer([1], refused="ValueError: x")),
        ({}, answer([1], problems=["a piece came after the end"])),
    ],
)
def test_what_its_parameters_do_not_allow_is_found(
    sampling: dict[str, Any], found: dict[str, Any]
) -> None:
    assert check_alone(unseeded(**sampling), RIGHT, found) is not None


@pytest.mark.parametrize(
    ("sampling", "found"),
    [
        ({"max_tokens": 3}, answer([1, 2, 3])),
        ({"allowed_token_ids": [1, 2]}, answer([1, 2])),
        (
            {"stop_token_ids": [5], "min_tokens": 2},
            answer([1, 5], ends=ends("stop", 5, 2)),
        ),
        ({"logprobs": 1}, answer([1], logprobs=[{1: (-2.0, 7), 2: (-0.1, 1)}])),
        ({"min_tokens": 4}, answer([1, 2], was_aborted=True, ends=[])),
    ],
)
def test_what_they_allow_is_not(
    sampling: dict[str, Any], found: dict[str, Any]
) -> None:
    assert check_alone(unseeded(**sampling), RIGHT, found) is None
