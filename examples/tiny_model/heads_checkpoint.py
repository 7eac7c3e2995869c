"""Checkpoints with extra heads: a trunk's own weights, and the heads beside them."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from examples.tiny_model.checkpoint import read_json, write_json

HEADS_FILE = "extra_heads.safetensors"
"""Weights of the heads alone, as they are committed."""

_OTHER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_ARCHITECTURE = "Qwen2ExtraHeadsForCausalLM"
"""A MiMo-style trunk is a Qwen2 model."""


def num_heads_of(heads: Mapping[str, torch.Tensor]) -> int:
    """Heads among weights named ``extra_heads.{i}.*``."""
    return len({name.split(".")[1] for name in heads})


def join_heads(source: Path, heads_folder: Path, output: Path) -> None:
    """Writes a complete checkpoint that vLLM loads with this project's plugin.

    Args:
        source: Checkpoint of the model that the heads were trained on; its MTP layers
            are left out.
        heads_folder: That of the heads' weights.
        output: Folder to write; must be empty or not exist yet.

    Raises:
        ValueError: `output` is not empty, or `source` is no checkpoint.
    """
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"output: {output} is not empty; expected a new folder")
    config = read_json(source / "config.json")
    heads = load_file(heads_folder / HEADS_FILE)
    trunk = {
        name: weight
        for name, weight in load_file(source / "model.safetensors").items()
        if ".mtp_layers." not in name
    }
    output.mkdir(parents=True, exist_ok=True)
    del config["num_nextn_predict_layers"]
    config |= {
        "architectures": [_ARCHITECTURE],
        "n_future_tokens": 1 + num_heads_of(heads),
    }
    write_json(output / "config.json", config)
    for name in _OTHER_FILES:
        shutil.copy(source / name, output / name)
    save_file(trunk | heads, output / "model.safetensors", metadata={"format": "pt"})
