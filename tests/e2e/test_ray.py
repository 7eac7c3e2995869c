"""Ray for real: as executor, and Ray Serve with replicas that come, die and go.

All of it happens once, on one local cluster (`ray_life`); here is what came of it.
"""

import json
from typing import Any

import pytest

from examples.ray_serve.by_replica import Counts
from examples.ray_serve.cluster import OBJECT_STORE_BYTES
from tests.support.engine_jobs import V1

TIMEOUT_S = 840


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What was found."""
    folder = tmp_path_factory.mktemp("ray")
    log = folder / "log"
    V1.run("tests.support.ray_life:run_in_fork", str(folder), log, TIMEOUT_S)
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found | {"log": log.read_text(errors="replace")}


def assert_answered(tally: dict[str, Any], texts: list[str]) -> None:
    """All were answered, in the end, with what the target alone says."""
    assert tally["num_sent"] == len(tally["texts"]) > 0
    assert tally["num_lost"] == 0
    assert tally["num_retried"] == tally["num_failed"] == len(tally["errors"])
    for number, text in tally["texts"].items():
        assert text == texts[int(number) % len(texts)]


# -- Ray as executor ------------------------------------------------------------------


def test_the_config_brings_everything_to_a_process_that_loaded_no_plugin(life) -> None:
    seen = life["seen"]
    assert not seen["plugin_loaded"]
    assert all(seen["front_end"].values()), seen["front_end"]
    assert len(seen["front_end"]) == 3
    assert seen["worker"] == "MTPPlusCPUWorker"
    assert seen["scheduler"] == "MTPPlusScheduler"
    assert seen["options"]["controller"] == "goodput"


def test_messages_are_the_same_behind_ray(life) -> None:
    assert life["crossed"] == {"step": True, "drafts": True, "output": True}
    # In the engine, too, none has lost what is ours.
    assert "arrives as vLLM's plain" not in life["log"]


def test_workers_in_actors_draft_and_texts_are_the_targets(life) -> None:
    assert len(life["worker_pids"]) == 1
    assert life["executor_equals"]
    assert life["executor_num_accepted"] > 0


def test_a_weight_update_reaches_the_actors(life) -> None:
    assert life["equals_after_update"]


def test_an_actor_that_dies_ends_the_engine_and_is_named(life) -> None:
    assert life["worker_error"]
    assert "RayWorkerProc rank=[0] died unexpectedly" in life["log"]


# -- Ray Serve ------------------------------------------------------------------------


def test_answers_are_streamed_and_tools_called(life) -> None:
    assert len(life["streamed"]) > 1
    assert "".join(life["streamed"]) == life["streamed_text"]
    assert 'A tool is called: get_weather({"city"' in life["demo"]


def test_the_demo_shows_what_each_replica_has_accepted(life) -> None:
    line = next(each for each in life["demo"].splitlines() if each.startswith("│"))
    _, drafted, accepted, tokens_per_step = (
        each.strip() for each in line.strip("│").split("│")
    )
    assert int(drafted) > 0
    assert 0 <= int(accepted) <= 100
    assert 1.0 <= float(tokens_per_step) < 9.0
    assert "Requests: 8 sent, 0 failed, 0 tried again, 0 lost." in life["demo"]


def test_a_bad_option_of_a_request_is_refused_by_the_replica(life) -> None:
    assert "mtp_plus_k" in life["refused"]
    assert "400" in life["refused"]


def test_under_load_a_second_replica_starts_and_no_request_fails(life) -> None:
    assert_answered(life["scaled_up"], life["texts"])
    assert life["scaled_up"]["num_failed"] == 0


def test_a_replica_that_is_killed_loses_only_what_it_was_answering(life) -> None:
    tally = life["killed"]
    assert_answered(tally, life["texts"])
    assert 0 < tally["num_failed"] <= life["requests_at_once"]
    for error in tally["errors"]:
        assert "500" in error
        assert "actor died" in error


def test_metrics_of_both_replicas_are_in_one_place(life) -> None:
    counts = [Counts(**each) for each in life["counts"].values()]
    assert len(counts) == 2
    for each in counts:
        # How much is drafted is the controller's affair: a replica that has just
        # started on a crowded machine may hardly draft.
        assert each.num_request_steps > 0
        assert 0 <= each.num_accepted_tokens <= each.num_draft_tokens
    assert sum(each.num_accepted_tokens for each in counts) > 0


@pytest.mark.long
def test_a_rolling_update_to_another_head_fails_no_request(life) -> None:
    assert_answered(life["updated"], life["texts"])
    assert life["updated"]["num_failed"] == 0
    assert life["replaced"]


@pytest.mark.long
def test_each_head_has_what_was_learned_of_it(life) -> None:
    names = [name for name in life["warm_files"] if name.endswith("controller.json")]
    assert names
    assert all(not name.startswith(".") for name in names)


# -- all of it ------------------------------------------------------------------------


def test_no_process_is_left(life) -> None:
    assert life["num_processes"] > 5
    assert life["left"] == []


def test_the_object_store_has_the_size_that_was_asked_for(life) -> None:
    assert life["object_store_bytes"] <= OBJECT_STORE_BYTES
