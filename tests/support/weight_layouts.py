"""One model, its MTP weights stored in the ways that converters store them.

A way is a function that changes a good checkpoint's folder and returns the head: a
folder of its own with the MTP layers alone, or None.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vllm_mtp.integration.load.headers import INDEX

MODEL_FILE, MTP_FILE = "model.safetensors", "mtp.safetensors"
MTP_LAYERS = ".mtp_layers."
LAYERS_KEY = "num_nextn_predict_layers"

Tensors = dict[str, torch.Tensor]


def split(folder: Path) -> tuple[Tensors, Tensors]:
    """The trunk's weights and those of the MTP layers."""
    tensors = load_file(folder / MODEL_FILE)
    own = {name: each for name, each in tensors.items() if MTP_LAYERS in name}
    return {name: tensors[name] for name in tensors.keys() - own.keys()}, own


def save(tensors: Tensors, path: Path) -> None:
    """A safetensors file."""
    save_file(tensors, path, metadata={"format": "pt"})


def write_index(folder: Path, places: Mapping[str, str]) -> None:
    """The files that vLLM loads, by weight."""
    (folder / INDEX).write_text(json.dumps({"weight_map": dict(places)}))


def put_into_unlisted_file(folder: Path) -> None:
    trunk, own = split(folder)
    save(trunk, folder / MODEL_FILE)
    save(own, folder / MTP_FILE)
    write_index(folder, dict.fromkeys(trunk, MODEL_FILE))


def put_prefix(path: Path) -> None:
    tensors = load_file(path)
    save({f"language_model.{n}": each for n, each in tensors.items()}, path)


def put_prefix_in_unlisted_file(folder: Path) -> None:
    put_into_unlisted_file(folder)
    put_prefix(folder / MTP_FILE)


def put_into_pickle(folder: Path) -> None:
    tensors = load_file(folder / MODEL_FILE)
    (folder / MODEL_FILE).unlink()
    torch.save(tensors, folder / "pytorch_model.bin")


def put_into_head(folder: Path) -> Path:
    """The model keeps neither weights nor the key in its config."""
    head = folder.parent / f"{folder.name}-head"
    shutil.copytree(folder, head)
    trunk, own = split(folder)
    save(trunk, folder / MODEL_FILE)
    save(own, head / MODEL_FILE)
    config = json.loads((folder / "config.json").read_text())
    del config[LAYERS_KEY]
    (folder / "config.json").write_text(json.dumps(config))
    return head


def put_prefix_in_head(folder: Path) -> Path:
    head = put_into_head(folder)
    put_prefix(head / MODEL_FILE)
    return head


WAYS: Mapping[str, Callable[[Path], Path | None]] = {
    "unlisted file": put_into_unlisted_file,
    "prefix in an unlisted file": put_prefix_in_unlisted_file,
    "pickle": put_into_pickle,
    "head": put_into_head,
    "prefix in a head": put_prefix_in_head,
}
