"""The bundled model, quantized as published checkpoints are."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.heldout import BUNDLED_CHECKPOINT

MTP_LAYERS = "mtp_layers"


def write_int8(folder: Path, has_quantized_mtp: bool, ignore: Sequence[str]) -> Path:
    """Weights and activations in 8 bits, in the format of compressed-tensors.

    Args:
        folder: Where it goes.
        has_quantized_mtp: The MTP layers are quantized like the trunk.
        ignore: Layers that are not, as the config names them.
    """
    shutil.copytree(BUNDLED_CHECKPOINT, folder)
    (file,) = folder.glob("*.safetensors")
    weights = {}
    for name, weight in load_file(file).items():
        # The projection in front of an MTP layer is torch's own.
        is_linear = name.endswith("_proj.weight") and "input_proj" not in name
        if is_linear and (has_quantized_mtp or MTP_LAYERS not in name):
            scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
            weights[name] = (weight.float() / scale).round().to(torch.int8)
            weights[f"{name}_scale"] = scale
        else:
            weights[name] = weight
    save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    in_8_bits = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": in_8_bits | {"strategy": "channel", "dynamic": False},
                "input_activations": in_8_bits | {"strategy": "token", "dynamic": True},
            }
        },
        "ignore": ["lm_head", *ignore],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
