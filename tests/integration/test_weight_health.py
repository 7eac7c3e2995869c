"""Damaged MTP layers, told from healthy ones by their files alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.families import FAMILIES
from tests.support.heldout import BUNDLED_CHECKPOINT
from tests.support.random_checkpoints import write_checkpoint
from vllm_mtp.integration.load.weight_health import (
    MAX_BYTES_PER_TENSOR,
    Problem,
    examine,
    read_headers,
)

Tensors = dict[str, torch.Tensor]


def problems(folder: Path, family: str, max_bytes: int) -> list[Problem]:
    headers = read_headers(folder.glob("*.safetensors"))
    own = [name for name in headers if FAMILIES[family].is_mtp_weight(name)]
    return list(examine(headers, own, max_bytes))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_healthy_checkpoint_has_no_problem(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    assert problems(tmp_path, family, MAX_BYTES_PER_TENSOR) == []


def test_the_trained_checkpoint_has_no_problem() -> None:
    assert problems(BUNDLED_CHECKPOINT, "mimo", MAX_BYTES_PER_TENSOR) == []


MLP = "model.mtp_layers.0.mlp.down_proj.weight"
NORM = "model.mtp_layers.0.input_layernorm.weight"


def zero(tensors: Tensors) -> None:
    tensors[MLP] = torch.zeros_like(tensors[MLP])


def put_nan(tensors: Tensors) -> None:
    tensors[MLP][3, 4] = torch.nan


def put_nan_into_a_norm(tensors: Tensors) -> None:
    tensors[NORM][0] = torch.inf


def round_away(tensors: Tensors) -> None:
    tensors[MLP] = tensors[MLP].sign() * 0.02


def shrink(tensors: Tensors) -> None:
    tensors[MLP] = tensors[MLP] * 1e-3


def lose_scales(tensors: Tensors) -> None:
    for name in list(tensors):
        if name.endswith("down_proj.weight"):
            tensors[name] = (tensors[name] * 100).round().to(torch.int8)
            if ".mtp_layers." not in name:
                tensors[f"{name}_scale"] = torch.tensor(0.01)


@pytest.mark.parametrize("max_bytes", [MAX_BYTES_PER_TENSOR, 5 * 2**12])
@pytest.mark.parametrize(
    ("damage", "kind", "weight"),
    [
        (zero, "zero", MLP),
        (put_nan, "not finite", MLP),
        (put_nan_into_a_norm, "not finite", NORM),
        (round_away, "rounded away", MLP),
        (shrink, "unlike the trunk", MLP),
        (lose_scales, "lost scales", MLP),
    ],
)
def test_a_damage_is_named(
    damage: Callable[[Tensors], None],
    kind: str,
    weight: str,
    max_bytes: int,
    tmp_path: Path,
) -> None:
    write_checkpoint(tmp_path, "mimo")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    damage(tensors)
    save_file(tensors, path)
    found = problems(tmp_path, "mimo", max_bytes)
    if damage is shrink and max_bytes < MAX_BYTES_PER_TENSOR:
        assert found == []  # sizes are the doctor's
        return
    assert [(each.kind, each.weight) for each in found] == [(kind, weight)]
    assert found[0].detail
