"""Routes of the page: what they say, to whom, and that they say nothing unasked."""

import asyncio
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.entrypoints.serve.middleware.authenticate import GUARDED_PREFIX

from tests.support.page_server import (
    ANSWER,
    KEY,
    PROMPT,
    FakeEngine,
    change_of,
    page_app,
    rounds_of,
)
from vllm_mtp.integration.observe.page import PAGE_PATH, ROUNDS_PATH, RoundsPage
from vllm_mtp.page.rounds import Round

AUTHORIZED = {"Authorization": f"Bearer {KEY}"}


def client_of(engine: FakeEngine | None) -> TestClient:
    return TestClient(page_app(engine), headers=AUTHORIZED)


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    engine = FakeEngine(show_rounds=2)
    for number, name in enumerate(("first", "second", "third")):
        engine.step(change_of(number, name, ANSWER))
    return engine


def test_vllm_finds_the_plugin_by_its_entry_point() -> None:
    (found,) = entry_points(group="vllm.endpoint_plugins", name="mtp_plus")
    assert found.load() is RoundsPage


@pytest.mark.parametrize("path", [ROUNDS_PATH, f"{ROUNDS_PATH}/0-2"])
def test_data_needs_the_servers_key_and_the_page_has_none(
    engine: FakeEngine, path: str
) -> None:
    assert path.startswith(GUARDED_PREFIX), "vLLM asks for the key"
    stranger = TestClient(page_app(engine))
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        answer = stranger.get(path, headers=headers)
        assert answer.status_code == 401
        assert answer.json() == {"error": "Unauthorized"}
    assert stranger.get(path, headers=AUTHORIZED).status_code == 200
    page = stranger.get(PAGE_PATH)
    assert page.status_code == 200
    assert "quicksort" not in page.text
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"] == "frame-ancestors 'none'"


@pytest.mark.parametrize("path", [ROUNDS_PATH, f"{ROUNDS_PATH}/0-2"])
def test_pages_of_other_sites_get_no_data(engine: FakeEngine, path: str) -> None:
    answer = client_of(engine).get(path, headers={"Origin": "https://example.com"})
    assert answer.status_code == 403
    assert set(answer.json()) == {"detail"}


def test_recent_requests_are_listed_newest_first_without_their_texts(
    engine: FakeEngine,
) -> None:
    answer = client_of(engine).get(ROUNDS_PATH)
    found = answer.json()
    assert found["max_requests"] == 2
    assert [each["name"] for each in found["requests"]] == ["third", "second"]
    assert [each["key"] for each in found["requests"]] == ["0-2", "0-1"]
    assert "prompt" not in found["requests"][0]
    assert "quicksort" not in answer.text


def test_a_request_is_shown_as_text_whatever_is_in_it(engine: FakeEngine) -> None:
    found = client_of(engine).get(f"{ROUNDS_PATH}/0-1").json()
    assert found["prompt"] == PROMPT
    told = ""
    for each in found["rounds"]:
        kept = [*each["draft"][: each["num_accepted"]], each["next"]]
        told += "".join(kept[: each["num_committed"]])
    assert told == ANSWER
    rounds = [Round(*each) for each in rounds_of(ANSWER)]
    sums = found["sums"]
    assert sums["num_drafts"] == sum(bool(each.draft) for each in rounds)
    assert sums["num_draft_tokens"] == sum(len(each.draft) for each in rounds)
    assert sums["num_accepted_tokens"] == sum(each.num_accepted for each in rounds)


@pytest.mark.parametrize("key", ["0-0", "0-9", "x", "1-1"])
def test_a_request_that_is_not_kept_is_status_404(engine: FakeEngine, key: str) -> None:
    answer = client_of(engine).get(f"{ROUNDS_PATH}/{key}")
    assert answer.status_code == 404


def test_without_the_option_there_is_nothing_to_be_had() -> None:
    """Even if the scheduler sent some."""
    engine = FakeEngine(show_rounds=0)
    engine.step(change_of(0, "first", ANSWER))
    client = client_of(engine)
    assert client.get(ROUNDS_PATH).json() == {"max_requests": 0, "requests": []}
    assert client.get(f"{ROUNDS_PATH}/0-0").status_code == 404


@pytest.mark.parametrize(
    "engine",
    [
        None,
        SimpleNamespace(logger_manager=None),
        SimpleNamespace(logger_manager=SimpleNamespace(stat_loggers=[])),
    ],
    ids=["no engine", "no statistics", "another method"],
)
def test_servers_without_our_method_show_nothing(engine: Any) -> None:
    client = client_of(engine)
    assert client.get(PAGE_PATH).status_code == 200
    assert client.get(ROUNDS_PATH).json() == {"max_requests": 0, "requests": []}
    assert client.get(f"{ROUNDS_PATH}/0-0").status_code == 404


def test_a_model_without_a_tokenizer_is_shown_by_numbers(engine: FakeEngine) -> None:
    config = engine.vllm_config.model_config
    config.skip_tokenizer_init = True
    try:
        found = client_of(engine).get(f"{ROUNDS_PATH}/0-2").json()
    finally:
        config.skip_tokenizer_init = False
    first = rounds_of(ANSWER)[0]
    assert found["rounds"][0]["next"] == f" {first[2]}"


def test_the_plugin_remembers_its_engine() -> None:
    app = FastAPI()
    asyncio.run(RoundsPage().init_state("engine", app.state, None))
    assert app.state.mtp_plus_engine == "engine"
