"""Every kind of request gets what it gets without speculation, on both runners."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import engine_jobs
from tests.support.request_kinds import CHOICES

RANDOM = {"method": "mtp_plus", "num_speculative_tokens": 5, "controller": "random"}
"""Any K for any request at any step; seeded ones have none."""
AUTO = {"method": "mtp_plus"}
# Async ones last: from there on their process schedules async.
ENGINES: dict[str, dict[str, dict[str, Any]]] = {
    "v1": {
        "plain": {},
        "random K": {"speculative_config": RANDOM},
        "auto": {"speculative_config": AUTO},
        "K = 0": {"speculative_config": AUTO, "pin": 0},
        "K = 3": {"speculative_config": AUTO, "pin": 3},
        "async": {"speculative_config": RANDOM, "async_scheduling": True},
        "async, auto": {"speculative_config": AUTO, "async_scheduling": True},
    },
    # Any K of any request is above, and pinning is.
    "v1, K = 1": {
        "plain": {},
        "K = 1": {"speculative_config": AUTO, "pin": 1},
    },
    "v2": {
        "plain": {},
        # As users run it.
        "random K": {"speculative_config": RANDOM, "async_scheduling": True},
    },
}


@pytest.fixture(
    scope="module",
    params=["v1", "v2", pytest.param("v1, K = 1", marks=pytest.mark.long)],
)
def runner(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def results(
    runner: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What each engine says."""
    folder: Path = tmp_path_factory.mktemp("kinds")
    result, engines = folder / "result.json", ENGINES[runner]
    order = {"engines": list(engines.values()), "result": str(result)}
    server = engine_jobs.V2 if runner == "v2" else engine_jobs.V1
    obey = "tests.support.request_kinds:answer_all"
    server.run(obey, order, folder / "log", timeout_s=600)
    return dict(zip(engines, json.loads(result.read_text()), strict=True))


def test_the_requests_ask_for_what_they_are_named_after(
    results: dict[str, Any],
) -> None:
    answers = results["plain"]["answers"]
    texts = {name: answer[0][0] for name, answer in answers.items()}
    assert texts["stop 1"][3] != texts["stop 2"][3] is not None
    assert texts["repetition"][2] == "repetition"
    assert texts["max_model_len"][2] == "length"
    assert texts["grammar choice"][1] in CHOICES
    plain = {0: texts["max_tokens"][0], 2: texts["prompt_logprobs"][0]}
    for name, i in (("penalties 1", 0), ("allowed", 0), ("logit_bias", 2)):
        assert texts[name][0][:7] != plain[i][:7], name
    assert all(len(row) == 3 for row in texts["listed 0"][4])


def test_all_kinds_equal(runner: str, results: dict[str, Any]) -> None:
    wanted = results["plain"]["answers"]
    assert not results["plain"]["counters"].get("draft_tokens")
    for name, arguments in list(ENGINES[runner].items())[1:]:
        found, counters = results[name]["answers"], results[name]["counters"]
        if arguments.get("pin") == 0:
            assert not counters["draft_tokens"]
        else:
            assert 0 < counters["accepted_tokens"] < counters["draft_tokens"], name
        # Who asks for both a seed and draft tokens gets other random numbers.
        skips = "seeded" if arguments.get("pin") else "no kind"
        assert not [
            kind
            for kind in wanted
            if found[kind] != wanted[kind] and not kind.startswith(skips)
        ], name


def test_ranks_gather_the_logprobs_of_listed_tokens(
    runner: str, results: dict[str, Any]
) -> None:
    if runner != "v2":
        pytest.skip("V1 does not divide batches among ranks")
    plain, ours = (results[name]["listed_dims"] for name in ("plain", "random K"))
    assert plain is None or plain[1] == 0
    assert ours[1] == 2
