"""Expansion of a checkpoint folder: see `expand` for what it does and why."""

import shutil
from pathlib import Path
from typing import NamedTuple

from examples.tiny_model.checkpoint import (
    DTYPES,
    load_weights,
    read_json,
    save_config,
    save_weights,
    write_json,
)
from examples.tiny_model.expand import (
    Expansion,
    Weights,
    expand_weights,
    shuffle_mtp,
    silences,
)
from examples.tiny_model.prompts import PROMPTS_FILE
from examples.tiny_model.provenance import PROVENANCE_FILE
from examples.tiny_model.shape import ModelShape

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


class GrowthReport(NamedTuple):
    """Parameters after and before, the MTP layer, embedding and head included."""

    num_parameters: int
    num_before: int


def _num_parameters(weights: Weights) -> int:
    return sum(weight.numel() for weight in weights.values())


def expand_checkpoint(
    source: Path,
    output: Path,
    expansion: Expansion,
    *,
    dtype: str = "bfloat16",
    seed: int = 0,
    shuffles_mtp: bool = False,
) -> GrowthReport:
    """Writes a grown copy of the checkpoint `source` to `output`.

    Args:
        source: Folder of a checkpoint this project made.
        output: Folder to write; must be empty or not exist yet.
        expansion: Sizes to reach.
        dtype: Of the stored weights; a key of `checkpoint.DTYPES`.
        seed: For the numbers that fill what is dead.
        shuffles_mtp: Whether the MTP layer's weights are shuffled, see `shuffle_mtp`.

    Raises:
        ValueError: If an argument is not usable or the checkpoint is damaged.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: {dtype!r}; expected one of {', '.join(DTYPES)}")
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"output: {output} is not empty; expected a new folder")
    old = ModelShape.from_hf_config(read_json(source / "config.json"))
    eos = read_json(source / "generation_config.json").get("eos_token_id")
    if not isinstance(eos, list) or not eos:
        raise ValueError(
            f"generation_config.json: eos_token_id is {eos!r}; expected a list of ids"
        )
    new = expansion.apply_to(old)
    if dtype == "float16" and silences(old, new):
        raise ValueError(
            "dtype: 'float16' cannot keep new tokens from being sampled; expected "
            "bfloat16 or float32 where both vocabulary and hidden size grow"
        )
    weights = load_weights(source / "model.safetensors")
    grown = expand_weights(weights, old, new, seed=seed)
    if shuffles_mtp:
        grown = shuffle_mtp(grown, seed=seed)
    output.mkdir(parents=True, exist_ok=True)
    save_config(output, new, eos_token_ids=eos, dtype=dtype)
    for name in _TOKENIZER_FILES:
        if not (source / name).is_file():
            raise ValueError(f"checkpoint: {source / name} is missing")
        shutil.copyfile(source / name, output / name)
    if (source / PROMPTS_FILE).is_file():  # texts that this model has not been shown
        shutil.copyfile(source / PROMPTS_FILE, output / PROMPTS_FILE)
    save_weights(grown, output / "model.safetensors", DTYPES[dtype])
    write_json(
        output / PROVENANCE_FILE,
        {
            "expanded_from": source.resolve().name,
            "seed": seed,
            "dtype": dtype,
            "shuffles_mtp": shuffles_mtp,
            "shape_before": old.model_dump(),
            "shape": new.model_dump(),
        },
    )
    return GrowthReport(_num_parameters(grown), _num_parameters(weights))
