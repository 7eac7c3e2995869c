"""Meta's multi-token checkpoints, as this plugin serves them.

In ``consolidated.pth`` the layers are the trunk and the head of the next token, and
``extra_heads.{i}`` lie beside them. Names become those of a Llama on the Hugging Face
hub; queries and keys are put into the order in which its rotary embedding pairs them.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Console

from vllm_mtp.config import ConfigError
from vllm_mtp.tools.options import Options, argument, option

WEIGHTS, PARAMS, TOKENIZER = "consolidated.pth", "params.json", "tokenizer.model"

_OUTSIDE = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INSIDE = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
"""Of a layer or an extra head."""

if TYPE_CHECKING:
    import torch

Weights: TypeAlias = "dict[str, torch.Tensor]"


@dataclass(frozen=True)
class ConvertHeadsOptions(Options):
    """Make a checkpoint with extra heads of one in Meta's layout.

    SOURCE holds consolidated.pth and params.json, with n_future_tokens in it.
    """

    source: Path = argument("Folder to read.")
    output: Path = argument("Folder to write; new or empty.")
    max_position: int = option(4096, "Longest context it was trained on.", 1, 10**7)


def convert_heads(options: ConvertHeadsOptions, console: Console) -> None:
    """Write config, weights and, where there is one, the tokenizer.

    Raises:
        ConfigError: A file is missing, or is not of such a checkpoint.
    """
    # Not for every command: it takes seconds to import.
    import torch
    from safetensors.torch import save_file

    for name in (WEIGHTS, PARAMS):
        if not (options.source / name).is_file():
            raise ConfigError(f"source: {options.source / name} is missing")
    if options.output.exists() and any(options.output.iterdir()):
        raise ConfigError(f"output: {options.output} is not empty")
    params = json.loads((options.source / PARAMS).read_text(encoding="utf-8"))
    weights = torch.load(
        options.source / WEIGHTS, map_location="cpu", weights_only=True, mmap=True
    )
    converted = rename_weights(weights, params)
    config = config_of(converted, params, options.max_position)
    options.output.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2) + "\n"
    (options.output / "config.json").write_text(text, encoding="utf-8")
    save_file(
        converted, options.output / "model.safetensors", metadata={"format": "pt"}
    )
    if (options.source / TOKENIZER).is_file():
        shutil.copy(options.source / TOKENIZER, options.output)
    console.print(
        f"{config['num_hidden_layers']} layers and {config['n_future_tokens'] - 1} "
        f"extra heads: {options.output}"
    )


def rename_weights(weights: Weights, params: dict[str, Any]) -> Weights:
    """All weights by their new names.

    Args:
        weights: Of ``consolidated.pth``.
        params: Of ``params.json``.

    Raises:
        ConfigError: Some have names that are not known.
    """
    num_heads = {"wq": params["n_heads"]}
    num_heads["wk"] = params.get("n_kv_heads") or params["n_heads"]
    renamed: Weights = {}
    for name, weight in weights.items():
        if name == "rope.freqs":  # computed anew
            continue
        new_name = _new_name(name)
        if new_name is None:
            raise ConfigError(f"{WEIGHTS}: {name} is not a weight of a Llama")
        part = name.split(".")[-2]
        if part in num_heads:
            weight = _halves_apart(weight, num_heads[part])
        renamed[new_name] = weight.contiguous()
    return renamed


def _new_name(name: str) -> str | None:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    place, _, rest = name.partition(".")
    index, _, inside = rest.partition(".")
    known = _INSIDE.get(inside.removesuffix(".weight"))
    if known is None or place not in ("layers", "extra_heads") or not index.isdigit():
        return None
    prefix = "model.layers" if place == "layers" else place
    return f"{prefix}.{index}.{known}.weight"


def _halves_apart(
    # [num_heads * head_dim, hidden_size]: rotated in pairs of neighbours
    weight: "torch.Tensor",
    num_heads: int,
) -> "torch.Tensor":
    """The same with rows in the order of a rotation in pairs half a head apart."""
    by_pair = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return by_pair.transpose(1, 2).reshape(weight.shape)


def config_of(
    weights: Weights, params: dict[str, Any], max_position: int
) -> dict[str, Any]:
    """``config.json``.

    Args:
        weights: By their new names.
        params: Of ``params.json``; what is not there has Meta's default.
        max_position: Longest context.

    Raises:
        ConfigError: There are no extra heads, or not as many as promised.
    """

    def count(prefix: str) -> int:
        norm = ".input_layernorm.weight"
        return sum(n.startswith(prefix) and n.endswith(norm) for n in weights)

    promised, found = params.get("n_future_tokens", 1), count("extra_heads.")
    if not found or found != promised - 1:
        raise ConfigError(
            f"{PARAMS}: n_future_tokens={promised} promises {promised - 1} extra "
            f"heads; {WEIGHTS} holds {found}"
        )
    vocab_size, hidden_size = weights["model.embed_tokens.weight"].shape
    return {
        "architectures": ["LlamaExtraHeadsForCausalLM"],
        "model_type": "llama",
        "n_future_tokens": promised,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": len(weights["model.layers.0.mlp.gate_proj.weight"]),
        "num_hidden_layers": count("model.layers."),
        "num_attention_heads": params["n_heads"],
        "num_key_value_heads": params.get("n_kv_heads") or params["n_heads"],
        "max_position_embeddings": max_position,
        "rms_norm_eps": params.get("norm_eps", 1e-5),
        "rope_theta": params.get("rope_theta", 10000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": str(weights["lm_head.weight"].dtype).removeprefix("torch."),
    }
