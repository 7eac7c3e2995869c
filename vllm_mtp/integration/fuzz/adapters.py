"""LoRA adapters of random numbers for the model of an engine, made when asked for."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine

RANK = 4
SCALE = 0.3
"""Of the second factor: the bundled model says something else with it, and its drafts
are still kept at times."""


def adapter(engine: LLMEngine, number: int | None) -> LoRARequest | None:
    """The adapter of that number, from 1; None for None.

    Args:
        engine: Of a dense model with Llama's names of layers.
        number: The same one makes the same adapter.
    """
    if number is None:
        return None
    path = Path(_folder().name, str(number))
    if not path.is_dir():
        path.mkdir()
        _write(path, number, engine.vllm_config.model_config.hf_text_config)
    return LoRARequest(f"adapter-{number}", number, str(path))


@cache
def _folder() -> Any:
    """Lives as long as this process, which has one model."""
    return TemporaryDirectory(prefix="vllm-mtp-adapters-")


def _write(path: Path, number: int, config: Any) -> None:
    generator = torch.Generator().manual_seed(number)
    tensors = {}
    for name, num_in, num_out in _layers(config):
        first = torch.randn(RANK, num_in, generator=generator) * num_in**-0.5
        second = torch.randn(num_out, RANK, generator=generator) * SCALE
        tensors[f"base_model.model.model.layers.{name}.lora_A.weight"] = first
        tensors[f"base_model.model.model.layers.{name}.lora_B.weight"] = second
    save_file(tensors, path / "adapter_model.safetensors")
    modules = sorted({name.rsplit(".", 1)[1] for name, _, _ in _layers(config)})
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "bias": "none",
        "target_modules": modules,
    }
    (path / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")


def _layers(config: Any) -> Iterator[tuple[str, int, int]]:
    """Name, inputs and outputs of what is adapted."""
    hidden = config.hidden_size
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, values = config.num_attention_heads, config.num_key_value_heads
    for layer in range(config.num_hidden_layers):
        yield f"{layer}.self_attn.q_proj", hidden, head * queries
        yield f"{layer}.self_attn.v_proj", hidden, head * values
        yield f"{layer}.self_attn.o_proj", head * queries, hidden
        yield f"{layer}.mlp.down_proj", config.intermediate_size, hidden
