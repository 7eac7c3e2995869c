"""A checkpoint that repeats its prompt: its shape, and what is the old model's."""

import json
import re
from pathlib import Path

import pytest
import torch

from examples.tiny_model import TINY_MODEL
from examples.tiny_model.checkpoint import load_weights
from examples.tiny_model.copying import NUM_NEW_LAYERS, make_copying_checkpoint


@pytest.fixture(scope="module")
def copying(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copying") / "model"
    make_copying_checkpoint(TINY_MODEL, folder)
    return folder


def test_the_config_says_which_channels_are_rotated(copying: Path) -> None:
    old, new = (
        json.loads((folder / "config.json").read_text())
        for folder in (TINY_MODEL, copying)
    )
    assert new["num_hidden_layers"] == old["num_hidden_layers"] + NUM_NEW_LAYERS
    old_head, new_head = (
        config["hidden_size"] // config["num_attention_heads"] for config in (old, new)
    )
    rotated = new["rope_parameters"]["partial_rotary_factor"] * new_head
    assert rotated == old_head


def test_old_channels_get_nothing_from_new_ones(copying: Path) -> None:
    """So where nothing is found the model says what it said."""
    old = load_weights(TINY_MODEL / "model.safetensors")
    new = load_weights(copying / "model.safetensors")
    hidden = old["model.norm.weight"].numel()
    for name, weight in new.items():
        is_circuit = bool(re.match(r"model\.layers\.[012]\.", name))
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            rows = weight[:hidden] if is_circuit else weight[hidden:]
            assert not rows.any(), name
        elif name.endswith(("q_proj.weight", "gate_proj.weight")) and not is_circuit:
            assert not weight[:, hidden:].any(), name
    torch.testing.assert_close(
        new["lm_head.weight"][:, :hidden], old["lm_head.weight"], rtol=0, atol=0
    )


def test_a_folder_in_use_is_not_overwritten(copying: Path) -> None:
    with pytest.raises(ValueError, match="not empty"):
        make_copying_checkpoint(TINY_MODEL, copying)


def test_a_model_without_room_is_refused(copying: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no room"):
        make_copying_checkpoint(copying, tmp_path / "again")
