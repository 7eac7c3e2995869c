"""Reads what tuning needs of a checkpoint and writes tuned MTP layers as one."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from vllm_mtp.config import ConfigError
from vllm_mtp.tune.families import Family, family_of
from vllm_mtp.tune.layer import MTPLayer
from vllm_mtp.tune.losses import Head
from vllm_mtp.tune.unroll import Drafter, Target

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
TUNING_FILE = "tuning.json"
_PLAIN = (torch.bfloat16, torch.float16, torch.float32)
_NUM_LAYERS_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


class Checkpoint:
    """A folder with a config and safetensors files."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            ConfigError: The config cannot be read, or there are no safetensors files.
        """
        self.folder = folder
        try:
            text = (folder / CONFIG_FILE).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"model: {folder}/{CONFIG_FILE} cannot be read: {error.strerror}"
            ) from None
        self.config: dict[str, Any] = json.loads(text)
        self.text_config: Mapping[str, Any] = self.config.get(
            "text_config", self.config
        )
        self._files: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                self._files |= dict.fromkeys(tensors.keys(), file)
        if not self._files:
            raise ConfigError(f"model: {str(folder)!r} has no safetensors files")

    def tensor(self, name: str) -> torch.Tensor:
        """A weight on the CPU.

        Raises:
            ConfigError: There is none of that name, or it is quantized.
        """
        if name not in self._files:
            raise ConfigError(f"model: {str(self.folder)!r} has no weight {name!r}")
        with safe_open(self._files[name], framework="pt") as tensors:
            found: torch.Tensor = tensors.get_tensor(name)
        if found.dtype not in _PLAIN:
            raise ConfigError(
                f"model: {name!r} of {str(self.folder)!r} is quantized "
                f"({found.dtype}): tune the model that it was made of; its head serves "
                "this one as well"
            )
        return found

    def dtypes(self, drafter: Drafter) -> dict[str, torch.dtype]:
        """What weights of MTP layers are stored in, by their names in a checkpoint.

        Copies are stored as what they are copies of.
        """
        own = self.num_mtp_layers
        found: dict[str, torch.dtype] = {}
        for number, layer in enumerate(drafter.layers):
            names = layer.names()  # type: ignore[operator]
            origin = drafter.layers[min(number, own - 1)].names()  # type: ignore[operator]
            for name, stored in zip(names, origin, strict=True):
                found[name] = self.tensor(stored).dtype
        return found

    @property
    def family(self) -> Family:
        """Of the model."""
        return family_of(self.config)

    @property
    def num_mtp_layers(self) -> int:
        """That the config promises."""
        found = (self.text_config.get(key) for key in _NUM_LAYERS_KEYS)
        return next((number for number in found if number), 0)

    def target(
        self, device: torch.device, drafted: torch.Tensor | None = None
    ) -> Target:
        """Embeddings, head and final norm, in float32 on a CPU, else in bfloat16.

        Args:
            device: Where to.
            drafted: ``[num_rows]`` int64: the draft vocabulary; None for all tokens.
        """
        family, trunk = self.family, self.family.trunk
        embedding = self.tensor(f"{trunk}embed_tokens.weight")
        tied = self.text_config.get("tie_word_embeddings", False)
        head = embedding if tied else self.tensor("lm_head.weight")
        norm = None
        if not family.trunk_is_normed:
            norm = _norm_like(family, self.text_config)
            norm.get_parameter("weight").data = self.tensor(f"{trunk}norm.weight")
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        if drafted is not None:
            drafted = drafted.to(device)
        made = Target(embedding, Head(head.to(device, dtype), drafted), norm)
        return made.to(device, dtype)

    def drafter(
        self, checkpoints: bool, loads: bool = True, num_layers: int | None = None
    ) -> Drafter:
        """The MTP layers, in float32 on the CPU.

        Args:
            checkpoints: See `Drafter`.
            loads: Take the weights; otherwise they are as torch draws them.
            num_layers: Those beyond the checkpoint's own are copies of its last one.
                None for its own.

        Raises:
            ConfigError: There are none, or other numbers of layers than its own are
                not possible.
        """
        own = self.num_mtp_layers
        if not own:
            raise ConfigError(f"model: {str(self.folder)!r} has no MTP layers")
        wanted = own if num_layers is None else num_layers
        if wanted < own or (wanted > own and not self.family.runs_several):
            raise ConfigError(
                f"mtp_layers={wanted} is not allowed: {str(self.folder)!r} has {own}"
                + (", and vLLM runs no more of its family" if wanted > own else "")
            )
        layers = [
            MTPLayer(self.family, self.text_config, index).float()
            for index in range(wanted)
        ]
        for number, layer in enumerate(layers):
            if loads and number < own:
                layer.load(self.tensor)
            elif loads:
                layer.load_state_dict(layers[own - 1].state_dict())
        return Drafter(layers, checkpoints)


def local_folder(model: str, revision: str | None = None) -> Path:
    """The folder of a model, which is downloaded if it has none."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors"]
    return Path(snapshot_download(model, revision=revision, allow_patterns=wanted))


def _norm_like(family: Family, config: Mapping[str, Any]) -> nn.Module:
    with torch.device("meta"):
        norm = MTPLayer(family, config, 0).final_norm
    return norm.to_empty(device="cpu")


def _with_layers(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """A ``config.json`` that promises so many MTP layers."""
    nested = config.get("text_config")
    if nested is not None:
        config = {**config, "text_config": _with_layers(nested, num_layers)}
    return {
        key: num_layers if key in _NUM_LAYERS_KEYS and value else value
        for key, value in config.items()
    }


def stored_weights(drafter: Drafter) -> dict[str, torch.Tensor]:
    """Of one process, on the CPU, by their names in the checkpoint."""
    found: dict[str, torch.Tensor] = {}
    for layer in drafter.layers:
        stored = layer.stored(layer.state_dict())  # type: ignore[operator]
        found |= {name: weight.cpu() for name, weight in stored.items()}
    return found


def write_head(
    folder: Path,
    model: Checkpoint,
    weights: Mapping[str, torch.Tensor],
    tuning: Mapping[str, Any],
    num_layers: int | None = None,
) -> None:
    """Write MTP layers as a checkpoint of their own, whole or not at all.

    ``{"method": "mtp_plus", "model": FOLDER}`` loads it, and vLLM's ``mtp`` as well.

    Args:
        folder: For the files.
        model: Whose MTP layers they are.
        weights: By their names in the checkpoint.
        tuning: How they were made.
        num_layers: How many they are; None for as many as the model's.
    """
    config = {k: v for k, v in model.config.items() if k != "quantization_config"}
    if num_layers is not None:
        config = _with_layers(config, num_layers)
    unfinished = folder / "unfinished"
    unfinished.mkdir(parents=True, exist_ok=True)
    save_file(
        dict(weights),
        unfinished / WEIGHTS_FILE,
        metadata={"format": "pt"},
    )
    for name, content in ((CONFIG_FILE, config), (TUNING_FILE, tuning)):
        text = json.dumps(content, indent=2) + "\n"
        (unfinished / name).write_text(text, encoding="utf-8")
    for name in (WEIGHTS_FILE, TUNING_FILE, CONFIG_FILE):
        shutil.move(unfinished / name, folder / name)
    unfinished.rmdir()
