"""Reading and writing checkpoints in the format that vLLM loads."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from examples.tiny_model.model import MiMoModel
from examples.tiny_model.shape import ModelShape
from examples.tiny_model.tokenizer import (
    END_OF_TEXT,
    TURN_END,
    save_tokenizer,
    token_id,
)

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file in one step: readers see the old or the new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2) + "\n")
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        ValueError: If the file is missing or holds no JSON object.
    """
    if not path.is_file():
        raise ValueError(f"checkpoint: {path} is missing")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"checkpoint: {path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"checkpoint: {path} holds no JSON object")
    return content


def save_weights(
    weights: Mapping[str, torch.Tensor], path: Path, dtype: torch.dtype
) -> None:
    """Writes weights in `dtype`, in one step."""
    stored = {
        name: weight.detach().to(dtype).contiguous() for name, weight in weights.items()
    }
    temporary = path.with_name(path.name + ".tmp")
    save_file(stored, temporary, metadata={"format": "pt"})
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """Reads every tensor of a safetensors file, as float32.

    Raises:
        ValueError: If the file is missing or damaged.
    """
    if not path.is_file():
        raise ValueError(f"checkpoint: {path} is missing")
    try:
        return {name: weight.float() for name, weight in load_file(path).items()}
    except SafetensorError as error:
        raise ValueError(f"checkpoint: {path} is damaged: {error}") from error


def save_config(
    folder: Path, shape: ModelShape, *, eos_token_ids: list[int], dtype: str
) -> None:
    """Writes `config.json` and `generation_config.json`.

    Args:
        folder: Checkpoint folder.
        shape: Sizes of the model.
        eos_token_ids: Tokens that end a generation; the first ends a text.
        dtype: A key of `DTYPES`.
    """
    config = shape.to_hf_config(eos_token_id=eos_token_ids[0], dtype=dtype)
    write_json(folder / "config.json", config)
    generation = {
        "eos_token_id": eos_token_ids,
        "pad_token_id": eos_token_ids[0],
        "do_sample": True,
        "temperature": 1.0,
    }
    write_json(folder / "generation_config.json", generation)


def save_checkpoint(
    folder: Path, model: MiMoModel, tokenizer: Tokenizer, *, dtype: str
) -> None:
    """Writes a complete checkpoint: weights, configs and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    eos = [token_id(tokenizer, token) for token in (END_OF_TEXT, TURN_END)]
    save_config(folder, model.shape, eos_token_ids=eos, dtype=dtype)
    save_tokenizer(
        tokenizer, folder, model_max_length=model.shape.max_position_embeddings
    )
    save_weights(model.state_dict(), folder / "model.safetensors", DTYPES[dtype])


def load_model(folder: Path) -> MiMoModel:
    """Reads a checkpoint into a float32 model in evaluation mode.

    Raises:
        ValueError: If a file is missing, or the weights do not fit the config.
    """
    shape = ModelShape.from_hf_config(read_json(folder / "config.json"))
    model = MiMoModel(shape)
    weights = load_weights(folder / "model.safetensors")
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        raise ValueError(f"checkpoint: {folder}: {error}") from error
    return model.eval()
