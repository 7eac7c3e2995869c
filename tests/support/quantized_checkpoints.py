"""The bundled model, quantized as published checkpoints are.

Rounding is to the nearest; the formats are those of compressed-tensors, GPTQ and AWQ.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file

from tests.support.heldout import BUNDLED_CHECKPOINT

MTP_LAYERS = "mtp_layers"
GROUP = 32
"""Weights of 4 bits that share a scale."""
_FP8, _FP8_MAX = torch.float8_e4m3fn, 448.0
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]

Tensors = dict[str, torch.Tensor]


class Format(NamedTuple):
    """Of quantized linear layers."""

    quantize: Callable[[torch.Tensor], Tensors]
    """Tensors by the last part of their names, of a weight ``[out, in]``."""
    config: Mapping[str, Any]
    exceptions: str
    """Where the config lists layers that are not quantized."""
    pattern: str
    """How it names the MTP layers."""


def _int8(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def _int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers from -8 to 7 as the weight, and ``[out, in / GROUP]`` scales."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(dim=2, keepdim=True) / 7
    numbers = (groups / scale).round().clamp(-8, 7).to(torch.int8)
    return numbers.flatten(1), scale[..., 0].bfloat16()


def _packed(weight: torch.Tensor) -> Tensors:
    numbers, scale = _int4(weight)
    shape = torch.tensor(weight.shape)
    packed = pack_to_int32(numbers, 4)
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}


def _gptq(weight: torch.Tensor) -> Tensors:
    numbers, scale = _int4(weight)
    num_outputs, num_inputs = weight.shape
    zeros = torch.full((num_inputs // GROUP, num_outputs), -1, dtype=torch.int8)
    return {
        "qweight": pack_to_int32(numbers.t(), 4, packed_dim=0).contiguous(),
        "qzeros": pack_to_int32(zeros, 4),  # one less than the zero, 8
        "scales": scale.t().contiguous().half(),
        "g_idx": (torch.arange(num_inputs) // GROUP).int(),
    }


def _awq(weight: torch.Tensor) -> Tensors:
    numbers, scale = _int4(weight)
    num_outputs, num_inputs = weight.shape
    zeros = torch.zeros(num_inputs // GROUP, num_outputs, dtype=torch.int8)

    def packed(values: torch.Tensor) -> torch.Tensor:
        eights = values.unflatten(1, (-1, 8))[..., _AWQ_ORDER]
        return pack_to_int32(eights.flatten(1).contiguous(), 4)

    return {
        "qweight": packed(numbers.t()),
        "qzeros": packed(zeros),
        "scales": scale.t().contiguous().half(),
    }


def _fp8(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax() / _FP8_MAX
    return {"weight": (weight / scale).to(_FP8), "weight_scale": scale.float()}


def _compressed(form: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": weights | {"symmetric": True}, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }


_BITS_8 = {"num_bits": 8, "type": "int", "symmetric": True}
_BITS_4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
_OF_4 = {"bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
_TOKENS = _BITS_8 | {"strategy": "token", "dynamic": True}
FORMATS: Mapping[str, Format] = {
    "int8": Format(
        _int8,
        _compressed(
            "int-quantized",
            _BITS_8 | {"strategy": "channel"},
            input_activations=_TOKENS,
        ),
        "ignore",
        f"re:.*{MTP_LAYERS}.*",
    ),
    "int4": Format(
        _packed,
        _compressed("pack-quantized", _BITS_4),
        "ignore",
        f"re:.*{MTP_LAYERS}.*",
    ),
    "gptq": Format(
        _gptq, {"quant_method": "gptq", **_OF_4}, "modules_in_block_to_quantize", ""
    ),
    "fp8": Format(
        _fp8,
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        "ignored_layers",
        "",
    ),
    "awq": Format(
        _awq,
        {"quant_method": "awq", "zero_point": True, "version": "gemm", **_OF_4},
        "modules_to_not_convert",
        MTP_LAYERS,
    ),
}


def write_quantized(folder: Path, kind: str, has_quantized_mtp: bool = True) -> Path:
    """Write a checkpoint.

    Args:
        folder: Where it goes.
        kind: One of `FORMATS`.
        has_quantized_mtp: The MTP layers are quantized like the trunk.
    """
    shutil.copytree(BUNDLED_CHECKPOINT, folder)
    (file,) = folder.glob("*.safetensors")
    chosen, weights = FORMATS[kind], {}
    for name, weight in load_file(file).items():
        # The projection in front of an MTP layer is torch's own.
        is_linear = name.endswith("_proj.weight") and "input_proj" not in name
        if is_linear and (has_quantized_mtp or MTP_LAYERS not in name):
            layer = name.removesuffix("weight")
            found = chosen.quantize(weight.float())
            weights |= {layer + part: each for part, each in found.items()}
        else:
            weights[name] = weight
    save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantization = dict(chosen.config)
    if not has_quantized_mtp and chosen.pattern:
        listed = quantization.get(chosen.exceptions, [])
        quantization[chosen.exceptions] = [*listed, chosen.pattern]
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return folder
