"""Checkpoints survive saving and loading; damaged ones are refused by name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from examples.tiny_model.checkpoint import load_model, save_checkpoint
from examples.tiny_model.expand import Expansion
from examples.tiny_model.grow import expand_checkpoint
from examples.tiny_model.model import MiMoModel
from examples.tiny_model.shape import ModelShape
from examples.tiny_model.tokenizer import MIN_VOCAB_SIZE, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["x = 1\n"], MIN_VOCAB_SIZE)


@pytest.fixture
def folder(tmp_path: Path, small_model: MiMoModel, tokenizer: Tokenizer) -> Path:
    path = tmp_path / "checkpoint"
    save_checkpoint(path, small_model, tokenizer, dtype="float32")
    return path


def test_a_saved_model_loads_bit_for_bit(folder: Path, small_model: MiMoModel) -> None:
    loaded = load_model(folder)

    assert loaded.shape == small_model.shape
    for name, weight in small_model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name


def test_weights_are_stored_in_the_asked_dtype(
    tmp_path: Path, small_model: MiMoModel, tokenizer: Tokenizer
) -> None:
    save_checkpoint(tmp_path / "b", small_model, tokenizer, dtype="bfloat16")

    stored = load_file(tmp_path / "b" / "model.safetensors")

    assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}


def test_tensor_names_are_those_of_published_mimo_checkpoints(folder: Path) -> None:
    names = set(load_file(folder / "model.safetensors"))

    layer = {
        *(f"self_attn.{p}_proj.{k}" for p in "qkv" for k in ("weight", "bias")),
        "self_attn.o_proj.weight",
        *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    }
    mtp = layer | {
        "token_layernorm.weight",
        "hidden_layernorm.weight",
        "input_proj.weight",
        "final_layernorm.weight",
    }
    assert names == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        *(f"model.layers.{index}.{name}" for index in range(2) for name in layer),
        *(f"model.mtp_layers.0.{name}" for name in mtp),
    }


def test_the_config_reads_back_as_the_same_shape(
    folder: Path, small_shape: ModelShape
) -> None:
    config = json.loads((folder / "config.json").read_text())

    assert config["architectures"] == ["MiMoForCausalLM"]
    assert ModelShape.from_hf_config(config) == small_shape


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()

    with pytest.raises(ValueError, match=rf"{name} is missing"):
        load_model(folder)


def test_a_damaged_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])

    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_model(folder)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("architectures", ["Qwen2ForCausalLM"], "architectures"),
        ("num_nextn_predict_layers", 2, "num_nextn_predict_layers is 2"),
        ("tie_word_embeddings", True, "tie_word_embeddings is True"),
        ("hidden_size", 64, r"size mismatch"),
    ],
)
def test_another_kind_of_model_is_refused(
    folder: Path, field: str, value: object, message: str
) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))

    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_an_expanded_checkpoint_is_complete_and_computes_the_same(
    folder: Path, tmp_path: Path, small_model: MiMoModel, token_ids: torch.Tensor
) -> None:
    grown_folder = tmp_path / "grown"
    (folder / "heldout_prompts.jsonl").write_text('{"text": "def"}\n')
    expansion = Expansion(num_hidden_layers=4, hidden_size=128, intermediate_size=64)

    report = expand_checkpoint(folder, grown_folder, expansion, dtype="float32")
    grown = load_model(grown_folder)

    assert report.num_parameters == sum(w.numel() for w in grown.parameters())
    assert report.num_before == sum(w.numel() for w in small_model.parameters())
    for name in ("tokenizer.json", "generation_config.json", "PROVENANCE.json"):
        assert (grown_folder / name).is_file()
    assert (grown_folder / "heldout_prompts.jsonl").read_text() == '{"text": "def"}\n'
    with torch.no_grad():
        torch.testing.assert_close(
            grown(token_ids), small_model(token_ids), rtol=1e-4, atol=2e-5
        )


def test_a_folder_in_use_is_not_overwritten(folder: Path) -> None:
    with pytest.raises(ValueError, match="is not empty"):
        expand_checkpoint(folder, folder, Expansion(num_hidden_layers=3))


def test_an_unknown_dtype_is_refused(folder: Path, tmp_path: Path) -> None:
    expansion = Expansion(num_hidden_layers=3)

    with pytest.raises(ValueError, match="dtype: 'int8'; expected one of"):
        expand_checkpoint(folder, tmp_path / "grown", expansion, dtype="int8")


def test_a_checkpoint_without_tokenizer_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "tokenizer.json").unlink()

    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        expand_checkpoint(copy, tmp_path / "out", Expansion(num_hidden_layers=3))
