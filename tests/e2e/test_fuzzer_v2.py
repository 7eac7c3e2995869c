"""Random requests are answered as without speculation: Model Runner V2, float32.

Triton's kernels are interpreted, so the requests are few and short.
"""

import json
from typing import Any

import pytest

from tests.support.fork_server import ForkServer
from tests.support.fuzzing import short_plays
from vllm_mtp.lab.fuzz_requests import KINDS, SESSION, kinds_of

AXES = ["sync", "async"]
PLAY_REQUESTS = 21


@pytest.fixture(scope="module")
def plays() -> dict[str, list[Any]]:
    """One for each axis."""
    made = short_plays(len(AXES), PLAY_REQUESTS, seed=1)
    return {axis: [play] for axis, play in zip(AXES, made, strict=True)}


@pytest.fixture(scope="module")
def found(
    plays: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What is found on each axis."""
    folder = tmp_path_factory.mktemp("fuzzer")
    server = ForkServer(
        "tests.support.engine_jobs:prepare_v2", "tests.support.fuzzing:play_in_fork"
    )
    result = folder / "result.json"
    order = {"plays": plays, "seed": 1, "result": str(result)}
    server.run(order, folder / "log", timeout_s=600)
    found: dict[str, dict[str, Any]] = json.loads(result.read_text())
    return found


def test_the_short_requests_are_of_most_kinds(plays: dict[str, Any]) -> None:
    requests = [r for shares in plays.values() for play in shares for r in play]
    kinds = set().union(*map(kinds_of, requests))
    assert SESSION in kinds
    assert len(kinds) > 0.7 * len(KINDS)


@pytest.mark.parametrize("axis", AXES)
def test_random_requests_are_answered_as_without_speculation(
    axis: str, found: dict[str, Any]
) -> None:
    findings = found[axis]
    assert not findings["failures"]
    assert findings["num_requests"] == PLAY_REQUESTS
    assert findings["num_compared"] > 0.8 * PLAY_REQUESTS
    counts = findings["counts"]
    assert counts["drafted"] > counts["accepted"] > 0
