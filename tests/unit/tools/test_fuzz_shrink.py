"""A failing play gets small and still fails."""

from typing import Any

from tests.unit.tools.fuzz_samples import request
from vllm_mtp.tools.fuzz_shrink import Shrinker


def needs(*conditions: Any) -> Any:
    """A play fails while every condition holds of some request."""
    return lambda play: all(any(map(condition, play)) for condition in conditions)


def has(name: str) -> Any:
    return lambda r: any(name in chunk["sampling"] for chunk in r["chunks"])


PLAY = [
    request(f"r{i}", logprobs=2, stop=["x"], include_stop_str_in_output=True)
    | {"arrives": i, "aborts": 3}
    for i in range(16)
]
PLAY[9]["chunks"][0]["sampling"]["min_tokens"] = 8


def test_one_request_with_one_option_is_left() -> None:
    (left,) = Shrinker(needs(has("min_tokens"))).shrink(PLAY, "r9")
    assert left["name"] == "r9"
    assert left.keys() == {"name", "chunks"}
    sampling = left["chunks"][0]["sampling"]
    assert sampling.keys() == {"temperature", "max_tokens", "min_tokens"}
    assert sampling["max_tokens"] == 1
    assert len(left["chunks"][0]["prompt"]) == 1


def test_fellows_that_matter_are_kept() -> None:
    fails = needs(lambda r: r["name"] == "r3", lambda r: r["name"] == "r12")
    left = Shrinker(fails, max_tries=200).shrink(PLAY)
    assert [r["name"] for r in left] == ["r3", "r12"]


def test_no_more_is_tried_than_allowed() -> None:
    tries = []

    def fails(play: list[dict[str, Any]]) -> bool:
        tries.append(len(play))
        return len(play) >= 5

    left = Shrinker(fails, max_tries=20).shrink(PLAY)
    assert len(tries) <= 20
    assert len(left) >= 5


def test_what_fails_as_a_whole_only_is_left_as_it_is() -> None:
    assert Shrinker(lambda play: False).shrink(PLAY, "r9") == PLAY


def test_a_session_loses_chunks() -> None:
    chunk = PLAY[0]["chunks"][0] | {"step": 0}
    session = {"name": "s", "session": True, "ends": 9, "chunks": [chunk] * 4}
    (left,) = Shrinker(lambda play: len(play[0]["chunks"]) >= 2).shrink([session], "s")
    assert len(left["chunks"]) == 2
