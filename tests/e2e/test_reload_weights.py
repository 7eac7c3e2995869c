"""New weights under a running server: its drafts are the new weights', too."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.engine_jobs import V2
from tests.support.engines import engine, greedy, model_runner, worker_of
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts
from tests.support.weight_updates import SPECULATION, WAYS, answers, write_other
from vllm_mtp.integration.worker import weight_updates
from vllm_mtp.integration.worker.weight_updates import WeightWatch

PROMPTS = [list(prompt) for prompt in heldout_prompts(8, max_tokens=48)]
Answers = tuple[list[list[int]], float]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("weights")
    return {
        "good": BUNDLED_CHECKPOINT,
        "other words": write_other(BUNDLED_CHECKPOINT, folder / "words", False),
        "untrained": write_other(BUNDLED_CHECKPOINT, folder / "untrained", True),
    }


@pytest.fixture(scope="module")
def fresh(checkpoints: dict[str, Path]) -> Answers:
    """Of an engine that begins with the other words."""
    with engine(checkpoints["other words"], speculative_config=SPECULATION) as llm:
        return answers(llm, PROMPTS, 40)


@pytest.fixture(scope="module")
def history(checkpoints: dict[str, Path]) -> dict[str, Answers]:
    """Of one engine, as its weights change; `written` has no text: see below."""
    found: dict[str, Answers] = {}

    def ask(name: str) -> None:
        # At once: later a learned vocabulary has read rows of the new head anyhow.
        llm.reset_prefix_cache()
        found[name] = answers(llm, PROMPTS, 40)

    with engine(checkpoints["good"], speculative_config=SPECULATION) as llm:
        for _ in range(3):  # until the vocabulary is in use
            ask("good")
        assert model_runner(llm).drafter.draft_vocab.is_active
        WAYS["reload"](llm, checkpoints["other words"])
        ask("reloaded")
        WAYS["transfer"](llm, checkpoints["good"])
        ask("transferred")
        found["written"] = [], float(_copies_after_writing(llm))
    return found


def _copies_after_writing(llm: Any) -> int:
    """How often the draft head is copied when its source is written into."""
    drafting = model_runner(llm).drafter.draft_vocab
    with (
        mock.patch.object(weight_updates, "STEPS_BETWEEN_LOOKS", 8),
        mock.patch.object(model_runner(llm).drafter.weight_watch, "_steps_to_look", 8),
        mock.patch.object(drafting, "copy_anew") as copy_anew,
    ):
        greedy(llm, PROMPTS[:2], 40)
        copy_anew.assert_not_called()
        head = worker_of(llm).get_model().lm_head.weight
        head.data.copy_(head.data.flip(0))
        greedy(llm, PROMPTS[:2], 40)
        return copy_anew.call_count


def test_drafts_are_made_by_the_new_head(
    history: dict[str, Answers], fresh: Answers
) -> None:
    text, accepted = history["reloaded"]
    assert text == fresh[0] != history["good"][0]
    # The vocabulary that was learned before stays, so it may be more.
    assert accepted > fresh[1] - 0.02 > 0.1


def test_and_after_a_session_of_weight_transfer(history: dict[str, Answers]) -> None:
    wanted, accepted = history["good"]
    assert history["transferred"] == (wanted, pytest.approx(accepted, abs=0.02))


def test_a_copy_that_stays_is_noticed(
    checkpoints: dict[str, Path], fresh: Answers
) -> None:
    """The comparison can fail: nobody is told."""
    with (
        mock.patch.object(WeightWatch, "note"),
        engine(checkpoints["good"], speculative_config=SPECULATION) as llm,
    ):
        for _ in range(3):
            answers(llm, PROMPTS, 40)
        WAYS["reload"](llm, checkpoints["other words"])
        llm.reset_prefix_cache()
        text, accepted = answers(llm, PROMPTS, 40)
    assert text == fresh[0]
    assert accepted < fresh[1] - 0.02


def test_what_is_written_into_parameters_is_found_soon(
    history: dict[str, Answers],
) -> None:
    """Whoever writes them, and tells nobody."""
    assert history["written"][1] == 1


def test_mtp_layers_are_reloaded_too(
    checkpoints: dict[str, Path], history: dict[str, Answers]
) -> None:
    """vLLM reloads the target alone."""
    speculation = SPECULATION | {"draft_vocab": "full"}
    with engine(checkpoints["untrained"], speculative_config=speculation) as llm:
        assert answers(llm, PROMPTS, 40)[1] < 0.05
        WAYS["reload"](llm, checkpoints["good"])
        llm.reset_prefix_cache()
        text, accepted = answers(llm, PROMPTS, 40)
        assert text == history["good"][0]
        assert accepted > history["good"][1] - 0.02
        # As after a sleep that has thrown weights away: from where they came.
        layers = model_runner(llm).drafter.model.model.mtp_layers
        for parameter in layers.parameters():
            parameter.data.zero_()
        llm.collective_rpc("reload_weights")
        llm.reset_prefix_cache()
        assert answers(llm, PROMPTS, 40) == (text, accepted)


def test_on_model_runner_v2(
    checkpoints: dict[str, Path], history: dict[str, Answers], tmp_path: Path
) -> None:
    order = {
        "good": str(checkpoints["good"]),
        "untrained": str(checkpoints["untrained"]),
        "spec": SPECULATION | {"num_speculative_tokens": 3},
        "prompts": PROMPTS[:4],
        "result": str(tmp_path / "result.json"),
    }
    V2.run("tests.support.weight_updates:play", order, tmp_path / "log", 300)
    found = json.loads((tmp_path / "result.json").read_text())
    text, accepted = found["after"]
    assert found["before"][1] < 0.05
    assert text == [each[:20] for each in history["good"][0][:4]]
    assert accepted > history["good"][1] - 0.1
