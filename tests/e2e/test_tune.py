"""``vllm-mtp tune``: from prompts to a head that is served."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.support.engines import draft_counts, engine, greedy
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts
from vllm_mtp.cli.main import app
from vllm_mtp.tools.prompts import load_prompts
from vllm_mtp.tools.tune import RUN_FOLDER, TEXTS_FOLDER
from vllm_mtp.tools.tune_verdict import Verdict
from vllm_mtp.tune.shards import Texts

NUM_PROMPTS, HELD_OUT = 30, 6
OPTIONS = {
    "--num-prompts": NUM_PROMPTS,
    "--answer-tokens": 24,
    "--max-model-len": 256,
    "--batch-tokens": 512,
    "--draft-steps": 3,
    "--draft-rows": 1024,
    "--epochs": 4,
    "--learning-rate": 0.002,
    "--eval-depths": "3",
    "--eval-prompts": HELD_OUT,
}


def tune(*arguments: str, **changed: Any) -> Any:
    options = OPTIONS | {
        f"--{name.replace('_', '-')}": v for name, v in changed.items()
    }
    words = [str(word) for pair in options.items() for word in pair]
    return CliRunner().invoke(app, ["tune", *arguments, *words])


def write_noisy_head(folder: Path) -> Path:
    """The bundled model's, as if little of it had been learned."""
    folder.mkdir()
    shutil.copy(BUNDLED_CHECKPOINT / "config.json", folder)
    torch.manual_seed(0)
    tensors = {
        name: weight + 0.5 * weight.std() * torch.randn_like(weight)
        for name, weight in load_file(BUNDLED_CHECKPOINT / "model.safetensors").items()
        if ".mtp_layers." in name and weight.dim() > 1
    }
    others = load_file(BUNDLED_CHECKPOINT / "model.safetensors")
    tensors |= {n: w for n, w in others.items() if ".mtp_layers." in n and w.dim() == 1}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Tuned:
    """A head, and the command that made it."""

    def __init__(self, folder: Path) -> None:
        self.head, self.noisy = folder / "head", write_noisy_head(folder / "noisy")
        self.arguments = (
            *(str(BUNDLED_CHECKPOINT), "--output", str(self.head)),
            *("--draft-model", str(self.noisy)),
        )
        self.result = tune(*self.arguments)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    return Tuned(tmp_path_factory.mktemp("tuned"))


def test_the_target_answers_each_prompt_once_and_the_judged_ones_never(
    tuned: Tuned,
) -> None:
    # Six prompts may be too few to show that it is better.
    assert tuned.result.exit_code in (0, 1), tuned.result.output
    assert "the tuned head drafts" in tuned.result.output.lower()
    assert "worse" not in tuned.result.output
    names = [place.name for place in Texts(tuned.head / TEXTS_FOLDER).places]
    ids = [each.id for each in load_prompts(None, str(BUNDLED_CHECKPOINT), NUM_PROMPTS)]
    judged = ids[:: NUM_PROMPTS // HELD_OUT]
    assert sorted([*names, *judged]) == sorted(ids)


def test_what_was_measured_is_written_with_its_origin(tuned: Tuned) -> None:
    tuning = json.loads((tuned.head / "tuning.json").read_text())
    before, after = (tuning["held_out"][when] for when in ("before", "after"))
    assert all(b > a for b, a in zip(before["kl"], after["kl"], strict=True))
    assert tuning["provenance"]
    assert (tuned.head / "tuning.svg").stat().st_size > 1000
    for name in ("before", "after"):
        path = tuned.head / RUN_FOLDER / f"eval-t1-k3-{name}.json"
        assert len(json.loads(path.read_text())["records"]) == HELD_OUT


@pytest.mark.parametrize("method", ["mtp_plus", "mtp"])
def test_the_head_is_served_and_the_text_is_the_targets(
    method: str, tuned: Tuned
) -> None:
    prompts = [list(prompt) for prompt in heldout_prompts(6, max_tokens=48)]
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "mtp_plus":
        speculation["controller"] = "fixed"
    texts, accepted = [], []
    for head in (tuned.noisy, tuned.head):
        config = speculation | {"model": str(head)}
        with engine(BUNDLED_CHECKPOINT, speculative_config=config) as llm:
            texts.append(greedy(llm, prompts, 24))
            accepted.append(draft_counts(llm).acceptance_rate)
    assert texts[0] == texts[1]
    assert accepted[1] > 1.2 * accepted[0]


def test_the_same_command_again_answers_and_trains_nothing(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_mtp.tools.tune.judge", lambda *args: Verdict([]))
    weights = (tuned.head / "model.safetensors").read_bytes()
    journal = (tuned.head / RUN_FOLDER / "journal.jsonl").read_bytes()
    again = tune(*tuned.arguments)
    assert "0 prompts to be answered" in again.output
    assert (tuned.head / "model.safetensors").read_bytes() == weights
    assert (tuned.head / RUN_FOLDER / "journal.jsonl").read_bytes() == journal


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"loss": "mse"}, "loss: 'mse' is not allowed; must be 'lk' or 'kl'"),
        ({"data": "nowhere"}, "data: 'nowhere' has no shard"),
        ({"draft_model": "nowhere"}, "model: nowhere/config.json cannot be read"),
    ],
)
def test_wrong_input_ends_in_a_sentence(
    changed: dict[str, Any], sentence: str, tuned: Tuned, tmp_path: Path
) -> None:
    output = str(tmp_path / "head")
    if "draft_model" in changed:
        changed |= {"data": tuned.head / TEXTS_FOLDER}
    result = tune(str(BUNDLED_CHECKPOINT), "--output", output, **changed)
    assert result.exit_code == 2, result.output
    assert sentence in " ".join(result.output.split())


def test_several_ranks_do_not_collect(
    tuned: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = tune(str(BUNDLED_CHECKPOINT), "--output", str(tmp_path))
    assert result.exit_code == 2
    assert "data: several ranks train on texts that are there already" in result.output
