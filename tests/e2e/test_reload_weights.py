"""New weights under a running server: its drafts are the new weights', too."""

import json
from pathlib import Path
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


def fresh(checkpoint: Path, draft_vocab: str) -> Answers:
    speculation = SPECULATION | {"draft_vocab": draft_vocab}
    with engine(checkpoint, speculative_config=speculation) as llm:
        return answers(llm, PROMPTS, 40)


@pytest.fixture(scope="module")
def with_other_words(checkpoints: dict[str, Path]) -> Answers:
    return fresh(checkpoints["other words"], "auto")


def after_update(way: str, draft_vocab: str, old: Path, new: Path) -> Answers:
    speculation = SPECULATION | {"draft_vocab": draft_vocab}
    with engine(old, speculative_config=speculation) as llm:
        for _ in range(3):  # until the vocabulary is in use, where there is one
            answers(llm, PROMPTS, 40)
        drafting = model_runner(llm).drafter.draft_vocab
        assert drafting.is_active == (draft_vocab == "auto")
        WAYS[way](llm, new)
        llm.reset_prefix_cache()
        # At once: later a learned vocabulary has read rows of the new head anyhow.
        return answers(llm, PROMPTS, 40)


@pytest.mark.parametrize("way", WAYS)
def test_drafts_are_made_by_the_new_head(
    way: str, checkpoints: dict[str, Path], with_other_words: Answers
) -> None:
    text, accepted = after_update(
        way, "auto", checkpoints["good"], checkpoints["other words"]
    )
    assert text == with_other_words[0]
    # The vocabulary that was learned before stays, so it may be more.
    assert accepted > with_other_words[1] - 0.02 > 0.1


def test_drafts_are_made_by_the_new_mtp_layers(checkpoints: dict[str, Path]) -> None:
    """vLLM reloads the target alone."""
    wanted, accepted = fresh(checkpoints["good"], "full")
    text, accepted_now = after_update(
        "reload", "full", checkpoints["untrained"], checkpoints["good"]
    )
    assert text == wanted
    assert accepted > 0.1
    assert accepted_now == pytest.approx(accepted, abs=0.02)


def test_a_copy_that_stays_is_noticed(
    checkpoints: dict[str, Path], with_other_words: Answers
) -> None:
    """The comparison can fail: nobody is told that weights were loaded."""
    with mock.patch.object(WeightWatch, "note"):
        _, accepted = after_update(
            "reload", "auto", checkpoints["good"], checkpoints["other words"]
        )
    assert accepted < with_other_words[1] - 0.02


def test_what_is_written_into_parameters_is_found_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever writes them, and tells nobody."""
    monkeypatch.setattr(weight_updates, "STEPS_BETWEEN_LOOKS", 8)
    with engine(BUNDLED_CHECKPOINT, speculative_config=SPECULATION) as llm:
        greedy(llm, PROMPTS[:2], 40)
        drafting = model_runner(llm).drafter.draft_vocab
        with mock.patch.object(drafting, "copy_anew") as copy_anew:
            greedy(llm, PROMPTS[:2], 40)
            copy_anew.assert_not_called()
            head = worker_of(llm).get_model().lm_head.weight
            head.data.copy_(head.data.flip(0))
            greedy(llm, PROMPTS[:2], 40)
            copy_anew.assert_called_once()


def test_on_model_runner_v2(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    order = {
        "good": str(checkpoints["good"]),
        "untrained": str(checkpoints["untrained"]),
        "spec": SPECULATION | {"num_speculative_tokens": 3},
        "prompts": [prompt[:24] for prompt in PROMPTS[:4]],
        "way": "reload",
        "result": str(tmp_path / "result.json"),
    }
    V2.run("tests.support.weight_updates:play", order, tmp_path / "log", 300)
    found = json.loads((tmp_path / "result.json").read_text())
    (wanted, accepted), (text, accepted_now) = found["fresh"], found["after"]
    assert found["before"][1] < 0.05 < accepted
    assert text == wanted
    assert accepted_now == pytest.approx(accepted, abs=0.02)
