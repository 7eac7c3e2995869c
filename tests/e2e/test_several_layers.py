"""Models with several MTP layers: what runs at each depth, and what is said.

On Model Runner V2 vLLM runs them in turn, layer *i* for draft token *i*. Each reads
what the one before has made of the rows of a step, so that all run in every step.
Otherwise a deeper layer would lack keys and values of what was committed meanwhile.
On Model Runner V1 the first one alone drafts, as often as the depth says.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.engine_jobs import V1, V2
from tests.support.random_checkpoints import random_prompts, write_checkpoint
from vllm_mtp.integration.load import classes

PROMPTS = random_prompts(4)
SCRIPT = [2, 1, 0, 2, 2, 1, 1]
Found = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    return write_checkpoint(folder, "glm4_moe", num_mtp_layers=2)


def run(runner: Any, model: Path, folder: Path, speculation: Any, script: Any) -> Found:
    result = folder / "result.json"
    order = {
        "model": str(model),
        "speculation": speculation,
        "script": script,
        "prompts": PROMPTS,
        "result": str(result),
    }
    runner.run("tests.support.module_passes:run_in_fork", order, folder / "log", 200)
    found: Found = json.loads(result.read_text())
    return found


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Texts without speculation."""
    folder = tmp_path_factory.mktemp("plain")
    texts: list[list[int]] = run(V1, model, folder, None, [])["texts"]
    return texts


def check_accepted(found: Found, depth: int) -> None:
    """Drafts are as long as a step was deep, some accepted and some not."""
    drafted = [(k, ok) for step in found["accepted"] for _, k, ok in step]
    assert {k for k, _ in drafted} == set(range(1, depth + 1))
    assert 0 < sum(ok for _, ok in drafted) < sum(k for k, _ in drafted)


def test_v2_runs_each_layer_once_in_every_step(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    found = run(V2, model, tmp_path, {"method": "mtp_plus"}, SCRIPT)
    assert found["drafter"] == "MTPPlusMultiModuleSpeculator"
    assert all(modules == [0, 1] for modules in found["modules"])
    assert set(found["depths"]) == {0, 1, 2}
    check_accepted(found, 2)
    assert found["texts"] == expected


def test_v1_runs_the_first_layer_as_often_as_the_depth_says(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    speculation = {"method": "mtp_plus", "num_speculative_tokens": 4}
    script = [4, 1, 0, 3, 2]
    found = run(V1, model, tmp_path, speculation, script)
    assert {number for modules in found["modules"] for number in modules} == {0}
    passes = [len(modules) for modules in found["modules"]]
    # Depth 0 follows depth 1: rows of draft tokens want their keys and values.
    assert passes == [max(1, depth) for depth in found["depths"]]
    check_accepted(found, 4)
    assert found["texts"] == expected


@pytest.mark.parametrize(("draft_length", "is_warned"), [(2, False), (4, True)])
def test_v2_warns_of_a_second_turn(
    draft_length: int, is_warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(classes.logger, "warning", lambda *words: said.append(words))
    draft = SimpleNamespace(hf_config=SimpleNamespace(n_predict=2))
    classes._warn_of_further_turns(
        SimpleNamespace(num_speculative_tokens=draft_length, draft_model_config=draft)
    )
    assert bool(said) == is_warned
