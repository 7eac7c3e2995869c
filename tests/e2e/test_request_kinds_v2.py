"""On Model Runner V2 every kind of request gets what it gets without speculation."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_server import ForkServer
from tests.support.request_kinds import CHOICES

RANDOM = {"method": "mtp_plus", "num_speculative_tokens": 5, "controller": "random"}
"""Any K for any request at any step; seeded ones have none."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What engines without speculation, with it, and with async scheduling say."""
    folder: Path = tmp_path_factory.mktemp("kinds")
    engines = {
        "plain": {},
        "sync": {"speculative_config": RANDOM},
        # Last: from here on that process schedules async.
        "async": {"speculative_config": RANDOM, "async_scheduling": True},
    }
    server = ForkServer(
        "tests.support.engine_jobs:prepare_v2", "tests.support.request_kinds:answer_all"
    )
    result = folder / "result.json"
    order = {"engines": list(engines.values()), "kinds": [], "result": str(result)}
    server.run(order, folder / "log", timeout_s=600)
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


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_all_kinds_equal(results: dict[str, Any], scheduling: str) -> None:
    plain, ours = results["plain"], results[scheduling]
    counters = ours["counters"]
    assert 0 < counters["accepted_tokens"] < counters["draft_tokens"]
    assert not plain["counters"].get("draft_tokens")
    wanted = plain["answers"]
    differing = [name for name in wanted if ours["answers"][name] != wanted[name]]
    assert not differing


def test_ranks_gather_the_logprobs_of_listed_tokens(results: dict[str, Any]) -> None:
    plain, ours = (results[name]["listed_dims"] for name in ("plain", "sync"))
    assert plain is None or plain[1] == 0
    assert ours[1] == 2
