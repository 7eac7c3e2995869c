"""The bundled model with its extra heads, as vLLM loads it."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from examples.tiny_model import EXTRA_HEADS, TINY_MODEL
from examples.tiny_model.heads import HeadsModel, load_heads_model
from examples.tiny_model.heads_checkpoint import HEADS_FILE, join_heads

NUM_HEADS = 3


def write_model(folder: Path) -> Path:
    """The checkpoint of trunk and heads, in a new folder."""
    join_heads(TINY_MODEL, EXTRA_HEADS, folder)
    return folder


def torch_model() -> HeadsModel:
    """The same model without vLLM, float32."""
    return load_heads_model(TINY_MODEL, NUM_HEADS, EXTRA_HEADS / HEADS_FILE)


def write_as_llama(source: Path, folder: Path) -> Path:
    """The same model with the names of a Llama: a bias on every projection."""
    config = json.loads((source / "config.json").read_text())
    config |= {
        "architectures": ["LlamaExtraHeadsForCausalLM"],
        "model_type": "llama",
        "attention_bias": True,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    weights = load_file(source / "model.safetensors")
    rows = [name for name in weights if name.endswith(".o_proj.weight")]
    weights |= {
        name.replace(".weight", ".bias"): torch.zeros_like(weights[name][:, 0])
        for name in rows
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class HeadPasses:
    """What an engine's heads returned, pass by pass."""

    def __init__(self, model: Any) -> None:
        self.outputs: list[torch.Tensor] = []
        """``[num_rows, num_heads, hidden_size]`` each."""
        forward = model.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            self.outputs.append(output[0].clone())
            return output

        model.forward = watched
