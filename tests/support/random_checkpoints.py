"""Small random checkpoints of model families with MTP layers.

A checkpoint has 1 to 4 MB of float32 weights drawn from a fixed seed and a tokenizer
that knows the word ``t7`` for token 7.

The trick that makes drafts agree with the target now and then: row ``t + 1`` of the
head is the embedding of token ``t``, and MTP layers let the embedding of their input
token through. So whatever reads the current token's embedding off the hidden state,
target or MTP layer, tends to predict "the current token plus one". Attention and MLPs
write random numbers of about that size over it, other ones in the target than in the
MTP layer, so that both leave the sequence now and then and not together: 50 to 70 % of
the drafts are accepted, and which ones depends on the context through the KV cache.
"""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests.support.families import FAMILIES, NOT_RUN
from tests.support.families.family import (
    HIDDEN_SIZE,
    MAX_POSITION,
    NUM_HIDDEN_LAYERS,
    VOCAB_SIZE,
    Family,
)
from tests.support.families.weights import WeightDrawer

MTPWeights = Literal["agreeing", "shuffled", "missing"]
"""What the weights of the MTP layers are worth:

- ``agreeing``: drafts are accepted now and then (see above);
- ``shuffled``: as if lost in quantization, the same numbers in random places, so that
  next to nothing is accepted;
- ``missing``: promised in ``config.json`` but not in the weights.
"""


ASSISTANT = "assistant"
"""Folder of the checkpoint that drafts, within the target's."""


def write_checkpoint(
    folder: Path,
    family_name: str,
    *,
    num_mtp_layers: int | None = None,
    mtp_weights: MTPWeights = "agreeing",
    seed: int = 0,
) -> Path:
    """Write a complete checkpoint.

    Args:
        folder: created if it does not exist.
        family_name: a key of ``FAMILIES`` or ``NOT_RUN``.
        num_mtp_layers: 0 gives a checkpoint without MTP layers, in config and weights;
            None as many as the family's are tested with.
        mtp_weights: health of the MTP layers' weights.
        seed: of the weights; the target's do not depend on the other arguments.

    Returns:
        ``folder``.

    Raises:
        ValueError: more MTP layers than vLLM can load for this family.
    """
    family = (FAMILIES | NOT_RUN)[family_name]
    if num_mtp_layers is None:
        num_mtp_layers = family.num_mtp_layers
    if not 0 <= num_mtp_layers <= family.max_mtp_layers:
        raise ValueError(
            f"num_mtp_layers={num_mtp_layers}: {family_name} allows 0 to "
            f"{family.max_mtp_layers}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", family.config_json(num_mtp_layers))
    weights = _draw_weights(family, num_mtp_layers, seed)
    mtp_names = [name for name in weights if family.is_mtp_weight(name)]
    if mtp_weights == "missing":
        weights = {name: weights[name] for name in weights.keys() - set(mtp_names)}
    elif mtp_weights == "shuffled":
        _shuffle(weights, mtp_names, seed)
    if family.assistant_config is not None:
        names = [name for name in weights if family.is_mtp_weight(name)]
        own = {name.partition(".")[2]: weights.pop(name) for name in names}
        _write_assistant(folder, family.assistant_config, own)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder


def _write_assistant(
    folder: Path, config: Mapping[str, Any], weights: dict[str, torch.Tensor]
) -> None:
    (folder / ASSISTANT).mkdir(exist_ok=True)
    write_json(folder / ASSISTANT / "config.json", dict(config))
    path = folder / ASSISTANT / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})


def random_prompts(num_prompts: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 3 to 20 tokens, of random ids that every checkpoint knows."""
    numbers = random.Random(seed)
    return [
        [numbers.randrange(VOCAB_SIZE) for _ in range(numbers.randint(3, 20))]
        for _ in range(num_prompts)
    ]


def _draw_weights(
    family: Family, num_mtp_layers: int, seed: int
) -> dict[str, torch.Tensor]:
    weights = WeightDrawer(seed)
    embedding = weights.embedding(family.embedding, VOCAB_SIZE, HIDDEN_SIZE)
    weights.tensors["lm_head.weight"] = embedding.roll(1, dims=0).contiguous()
    weights.vector(family.final_norm, HIDDEN_SIZE, mean=family.norm_mean)
    for index in range(NUM_HIDDEN_LAYERS):
        family.draw_trunk_layer(weights, index)
    for index in range(num_mtp_layers):
        family.draw_mtp_layer(weights, index)
    return weights.tensors


def _shuffle(weights: dict[str, torch.Tensor], names: Iterable[str], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name in names:
        flat = weights[name].flatten()
        order = torch.randperm(flat.numel(), generator=generator)
        weights[name] = flat[order].view_as(weights[name])


def write_tokenizer(folder: Path) -> None:
    vocabulary = {f"t{token}": token for token in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_POSITION,
            "eos_token": "t0",
            "pad_token": "t0",
            "unk_token": "t0",
        },
    )


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
