"""``vllm-mtp doctor``: every fault that it knows, through the command line."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.support.heldout import BUNDLED_CHECKPOINT
from tests.support.random_checkpoints import write_checkpoint
from vllm_mtp.cli.main import app
from vllm_mtp.integration.load import compat
from vllm_mtp.integration.load.doctor import GraphFacts
from vllm_mtp.tools import doctor_probe
from vllm_mtp.tools.doctor import _of_graphs

MLP = "model.mtp_layers.0.mlp.down_proj.weight"
Tensors = dict[str, torch.Tensor]


def doctor(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report."""
    has_model = bool(arguments) and not arguments[0].startswith("--")
    model = () if has_model else (str(BUNDLED_CHECKPOINT),)
    result = CliRunner().invoke(app, ["doctor", *model, *arguments, "--json"])
    return result.exit_code, json.loads(result.stdout)


def problems(report: dict[str, Any]) -> list[str]:
    return [
        f"{each['topic']}: {each['text']}"
        for each in report["findings"]
        if each["level"] == "problem"
    ]


@pytest.mark.parametrize("family", ["mimo", "deepseek_v3", "glm4_moe", "ernie45_moe"])
def test_a_healthy_checkpoint_is_ready(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    code, report = doctor(str(tmp_path))
    assert problems(report) == []
    assert code == 0
    assert report["is_healthy"]
    topics = [each["topic"] for each in report["findings"]]
    topics_of_model = ["model", "family", "weights", "memory", "CUDA graphs"]
    assert topics == ["vLLM", "kernels", *topics_of_model]


def test_a_head_that_another_checkpoint_has(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "mimo", num_mtp_layers=0)
    head = write_checkpoint(tmp_path / "head", "mimo")
    code, report = doctor(str(model), "--draft-model", str(head))
    assert (code, problems(report)) == (0, [])
    (text,) = (f["text"] for f in report["findings"] if f["topic"] == "weights")
    assert text.endswith(": 16 in model.safetensors")


def test_a_model_without_mtp_layers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mimo", num_mtp_layers=0)
    code, report = doctor(str(tmp_path))
    assert code == 1
    (problem,) = problems(report)
    assert "has no MTP layers" in problem


def test_a_hybrid_model_on_a_cpu_is_refused_before_it_is_served(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_next")
    code, report = doctor(str(tmp_path))
    assert code == 1
    (problem,) = problems(report)
    assert "recurrent layers" in problem
    assert "serve it without speculation here" in problem


def test_promised_layers_that_are_missing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mimo", mtp_weights="missing")
    code, report = doctor(str(tmp_path))
    assert code == 1
    (problem,) = problems(report)
    assert problem.startswith("weights: missing: model.mtp_layers.0.")
    assert problem.endswith("and 8 more")


def zero(tensors: Tensors) -> None:
    tensors[MLP].zero_()


def put_nan(tensors: Tensors) -> None:
    tensors[MLP][0, 0] = torch.nan


def transpose(tensors: Tensors) -> None:
    tensors[MLP] = tensors[MLP].t().contiguous()


def quantize_away(tensors: Tensors) -> None:
    tensors[MLP] = tensors[MLP].sign() * 0.01


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (zero, f"weights: zero: {MLP}"),
        (put_nan, f"weights: not finite: {MLP}"),
        (transpose, f"weights: wrong shape: {MLP}"),
        (quantize_away, f"weights: rounded away: {MLP}"),
    ],
)
def test_damaged_weights_are_named(
    damage: Callable[[Tensors], None], words: str, tmp_path: Path
) -> None:
    path = write_checkpoint(tmp_path, "mimo") / "model.safetensors"
    tensors = load_file(path)
    damage(tensors)
    save_file(tensors, path)
    code, report = doctor(str(tmp_path))
    assert code == 1
    (problem,) = problems(report)
    assert problem.startswith(words)


def test_a_vllm_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, "mimo")
    monkeypatch.setattr(compat, "version", lambda _: "0.31.0")
    code, report = doctor(str(tmp_path))
    assert code == 1
    (problem,) = problems(report)
    assert problem.startswith("vLLM: vllm 0.31.0 is too old")


def test_a_family_that_no_test_runs_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, "mimo")
    monkeypatch.setattr("vllm_mtp.tools.doctor.TRIED_FAMILIES", frozenset())
    code, report = doctor(str(tmp_path))
    assert code == 0
    notes = [each["text"] for each in report["findings"] if each["level"] == "note"]
    assert any("MiMoMTPModel is expected to work" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/nowhere", "is neither a folder with a checkpoint nor a name"),
        (None, "holds no config.json"),
    ],
)
def test_a_model_that_is_not_there_is_one_sentence(
    name: str | None, words: str, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, ["doctor", name or str(tmp_path)])
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_standard_output_is_the_report_and_nothing_else() -> None:
    command = str(Path(sys.executable).with_name("vllm-mtp"))
    done = subprocess.run(
        [command, "doctor", str(BUNDLED_CHECKPOINT), "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["is_healthy"]


@pytest.fixture
def short_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less exact, and over in a third of the time."""
    monkeypatch.setattr(doctor_probe, "NUM_CYCLES", 4)
    monkeypatch.setattr(doctor_probe, "MAX_PROMPTS", 40)


@pytest.mark.usefixtures("short_probe")
def test_the_probe_predicts_a_speedup() -> None:
    code, report = doctor("--probe", "--dtype", "float32")
    assert code == 0, problems(report)
    probe = report["probe"]
    survival = probe["survival"]
    assert 0.4 < survival[0] < 1.0
    assert survival == sorted(survival, reverse=True)
    by_length = {each["draft_length"]: each for each in probe["lengths"]}
    assert by_length[0]["predicted_speedup"] == 1.0
    best = by_length[probe["best_draft_length"]]
    assert best["predicted_speedup"] == probe["predicted_speedup"]
    lower, upper = probe["interval"]
    if probe["best_draft_length"]:
        assert lower < probe["predicted_speedup"] < upper
    else:  # this model hardly gains, and the clock decides
        assert lower == upper == 1.0
    assert probe["num_drafts"] > 500
    topics = [each["topic"] for each in report["findings"]]
    assert topics[-3:] == ["acceptance", "cost", "prediction"]


def test_the_probe_finds_weights_in_the_wrong_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in the file tells them from right ones."""
    # What drafts cost is not asked here, nor how many pay.
    monkeypatch.setattr(doctor_probe, "NUM_CYCLES", 1)
    monkeypatch.setattr(doctor_probe, "LENGTHS", (0, 3))
    monkeypatch.setattr(doctor_probe, "MAX_PROMPTS", 12)
    for file in BUNDLED_CHECKPOINT.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(0)
    for name in (name for name in tensors if ".mtp_layers." in name):
        order = torch.randperm(tensors[name].numel(), generator=generator)
        shuffled = tensors[name].flatten()[order]
        tensors[name] = shuffled.view_as(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})
    code, report = doctor(str(tmp_path))
    assert code == 0
    # A base model, whose checkpoint brings no prompts: the built-in conversations are
    # continued as they are.
    (tmp_path / "heldout_prompts.jsonl").unlink()
    config_path = tmp_path / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    del config["chat_template"]
    config_path.write_text(json.dumps(config))
    code, report = doctor(str(tmp_path), "--probe", "--dtype", "float32")
    assert code == 1
    (problem,) = problems(report)
    assert problem.startswith("acceptance:")


def test_graphs_are_counted_for_both_kinds_of_attention() -> None:
    finding = _of_graphs(GraphFacts(num_for_any_mix=137, num_for_equal_lengths=289))
    assert finding.text.startswith("137 full ones where attention replays unequal")
    assert "otherwise 289" in finding.text
