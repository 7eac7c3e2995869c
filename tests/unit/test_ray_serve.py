"""`examples/ray_serve` without Ray: options, counts, processes, and what is refused."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.ray_serve import app, cluster
from examples.ray_serve.app import AppOptions, build, llm_config
from examples.ray_serve.by_replica import counts_by_replica
from examples.ray_serve.clients import Clients
from examples.ray_serve.processes import ProcessWatch
from vllm_mtp.config import ConfigError

MODEL = "owner/name"


# -- options --------------------------------------------------------------------------


def test_the_method_alone_is_all_that_a_server_needs() -> None:
    config = llm_config(AppOptions(MODEL))
    assert config["engine_kwargs"]["speculative_config"] == {"method": "mtp_plus"}
    assert config["model_loading_config"]["model_source"] == MODEL
    assert "accelerator_config" not in config  # Ray Serve LLM takes GPUs then


def test_head_and_folder_go_into_the_speculative_config() -> None:
    options = AppOptions(MODEL, head="a/head", warm_start_path="/shared")
    assert options.speculative_config == {
        "method": "mtp_plus",
        "model": "a/head",
        "warm_start_path": "/shared",
    }


def test_replicas_scale_between_their_bounds_by_requests_under_way() -> None:
    options = AppOptions(MODEL, min_replicas=2, max_replicas=5, requests_at_once=8)
    deployment = llm_config(options)["deployment_config"]
    scaling = deployment["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (2, 5)
    assert scaling["target_ongoing_requests"] == 4
    assert deployment["max_ongoing_requests"] == 8


def test_a_model_in_a_folder_is_found_from_every_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = llm_config(AppOptions(str(tmp_path)))
    assert Path(config["model_loading_config"]["model_source"]).is_absolute()
    assert "callback_config" in config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "model: is missing; expected a folder or a hub name"),
        ({"model": MODEL, "replica": "2"}, "replica: no such option; expected model"),
        ({"model": MODEL, "max_replicas": "many"}, "max_replicas: 'many' is not allow"),
        (
            {"model": MODEL, "min_replicas": "3", "max_replicas": "2"},
            r"max-replicas: 2 is not allowed; expected min-replicas \(3\) or more",
        ),
        ({"model": MODEL, "requests_at_once": "0"}, "requests-at-once: 0"),
        ({"model": MODEL, "autoscaling": "{"}, "autoscaling: '{' is not allowed"),
        ({"model": "no such model"}, "model: 'no such model' is neither a folder"),
    ],
)
def test_a_mistake_is_named_before_anything_starts(
    arguments: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(arguments)


# -- without Ray ----------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["ray", "jsonref"])
def test_without_ray_the_demo_names_the_extra_and_ends_with_code_2(
    missing: str,
) -> None:
    # None in sys.modules: as if it were not installed.
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from examples.ray_serve.__main__ import app; app()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 2
    why = "it is not installed; pip install 'vllm-mtp[ray]'"
    assert done.stderr == f"error: {missing}: {why}\n"


def test_without_ray_an_application_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"^ray: it is not installed; pip install"):
        app.make_application(AppOptions(MODEL))


def test_a_folder_whose_sockets_would_have_too_long_names_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(cluster.tempfile, "tempdir", str(long))
    with pytest.raises(ConfigError, match=r"^TMPDIR=.* is not allowed: must have at m"):
        cluster._short_folder()
    assert list(long.iterdir()) == []


# -- counts by replica ----------------------------------------------------------------

METRICS = """
# TYPE ray_vllm_mtp_draft_tokens_total counter
ray_vllm_mtp_draft_tokens_total{ReplicaId="a",position="0"} 10.0
ray_vllm_mtp_draft_tokens_total{ReplicaId="a",position="1"} 6.0
ray_vllm_mtp_draft_tokens_total{ReplicaId="b",position="0"} 4.0
ray_vllm_mtp_draft_tokens_total{ReplicaId="",position="0"} 99.0
# TYPE ray_vllm_mtp_accepted_tokens_total counter
ray_vllm_mtp_accepted_tokens_total{ReplicaId="a",position="0"} 8.0
# TYPE ray_vllm_mtp_request_steps_total counter
ray_vllm_mtp_request_steps_total{ReplicaId="a",draft_length="2"} 10.0
# TYPE ray_serve_requests_total counter
ray_serve_requests_total{ReplicaId="a"} 7.0
"""


def test_counts_are_summed_for_each_replica() -> None:
    counts = counts_by_replica(METRICS)
    assert set(counts) == {"a", "b"}
    assert counts["a"].acceptance == 0.5
    assert counts["a"].tokens_per_step == 1.8
    assert counts["b"].acceptance == 0.0
    assert counts["b"].tokens_per_step != counts["b"].tokens_per_step  # NaN: no step


# -- clients --------------------------------------------------------------------------


class _Flaky(Clients):
    """An endpoint that fails some tries."""

    def __init__(self, failures: dict[str, int]) -> None:
        super().__init__("http://127.0.0.1:1/v1", 3)
        self._failures = failures

    def ask(self, prompt, max_tokens, options=None) -> str:
        import httpx
        import openai

        if self._failures.get(prompt, 0):
            self._failures[prompt] -= 1
            raise openai.APIConnectionError(request=httpx.Request("POST", "http://x"))
        return prompt.upper()


def test_what_fails_is_tried_again_and_counted() -> None:
    tally = _Flaky({"b": 1, "c": 99}).send(["a", "b", "c"], 4)
    assert tally.texts == {0: "A", 1: "B"}
    assert (tally.num_sent, tally.num_failed) == (3, 5)
    assert (tally.num_retried, tally.num_lost) == (4, 1)
    assert len(tally.errors) == 5


# -- processes ------------------------------------------------------------------------

SLEEP = "import time; time.sleep(60)"


def test_a_process_whose_parent_has_died_is_still_found_and_ended() -> None:
    orphan = f"import subprocess as s, sys; s.Popen([sys.executable, '-c', {SLEEP!r}])"
    with ProcessWatch() as watch:
        parent = subprocess.Popen([sys.executable, "-c", f"{orphan}; {SLEEP}"])
        deadline_s = time.monotonic() + 60
        while len(watch.living("time.sleep")) < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        parent.kill()
        parent.wait()
        (left,) = watch.living("time.sleep")
        assert list(watch.end_all(timeout_s=0.0)) == [left]
        while watch.living():
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


def test_processes_that_ran_before_are_nobodys_business() -> None:
    before = subprocess.Popen([sys.executable, "-c", SLEEP])
    try:
        with ProcessWatch() as watch:
            assert before.pid not in watch.living()
            assert watch.end_all(timeout_s=0.0) == {}
        assert before.poll() is None
    finally:
        before.kill()
        before.wait()
